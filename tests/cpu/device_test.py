"""Options of XLA's compiler."""

import jax
import jax.numpy as jnp

from bpd_jax.cpu import device
from bpd_jax.models.programs import Program


def test_options_that_xla_lacks_are_not_used(monkeypatch):
    options = {**device.COMPILER_OPTIONS, "xla_cpu_no_such_option": True}
    monkeypatch.setattr(device, "COMPILER_OPTIONS", options)
    used = device.compiler_options()
    assert used is not None
    assert used.keys() < options.keys()
    program = Program(lambda x: x + 1, static=(), constants=())
    assert program(jnp.ones(2)).tolist() == [2, 2]
    # As a part of another program, whose options count.
    assert jax.jit(lambda x: program(x))(jnp.ones(2)).tolist() == [2, 2]


def test_matrices_of_layers_are_not_all_expanded_at_once():
    def product(x, layers):
        for integers in layers:
            x = jnp.tanh(x @ (integers.astype(jnp.float32) * 0.01))
        return x

    width = 512
    layers = [jnp.ones((width, width), jnp.int8)] * 8
    lowered = jax.jit(product).lower(jnp.ones((256, width)), layers)
    compiled = lowered.compile(device.compiler_options(in_order=True))
    expanded = 4 * width**2
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * expanded
