"""Options of XLA's compiler."""

import jax
import jax.numpy as jnp

from bpd_jax.models.cpu import device
from bpd_jax.models.programs import Program


def test_options_that_xla_lacks_are_not_used(monkeypatch):
    device._has_options.cache_clear()
    monkeypatch.setattr(device, "COMPILER_OPTIONS", {"xla_cpu_no_such_option": True})
    try:
        assert device.compiler_options() is None
        program = Program(lambda x: x + 1, static=(), constants=())
        assert program(jnp.ones(2)).tolist() == [2, 2]
        # As a part of another program, whose options count.
        assert jax.jit(lambda x: program(x))(jnp.ones(2)).tolist() == [2, 2]
    finally:
        device._has_options.cache_clear()


def test_a_program_is_a_part_of_another():
    program = Program(lambda x: x + 1, static=(), constants=())
    assert jax.jit(lambda x: 2 * program(x))(jnp.ones(2)).tolist() == [4, 4]
    assert jax.eval_shape(program, jnp.ones(2)).shape == (2,)
