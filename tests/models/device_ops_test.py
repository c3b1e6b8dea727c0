"""What devices do in another way, and options of XLA's compiler."""

import json

import jax
import jax.numpy as jnp

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.models import device_ops
from bpd_jax.models.decoding_parameters import prepared
from bpd_jax.models.model import Model
from bpd_jax.models.programs import Program
from tests.commands import python
from tests.decoding.random_models import make_model, make_prompts


def decoded():
    """Tokens of a model that is ready for decoding: plainly, and with drafts."""
    model = make_model(num_layers=1, max_length=64)
    decoder = Decoder(Model(*prepared(model.config, model.params, None, None)), width=4)
    options = DecodeOptions(max_new_tokens=8)
    return [
        [text.output_ids.tolist() for text in decoder.decode(method, prompts, options)]
        for method in map(parse_method, ("greedy", "heads"))
        for prompts in [make_prompts([5, 9])]
    ]


def test_without_the_package_of_a_device_the_same_text_is_decoded():
    # None in sys.modules makes a package absent.
    program = (
        "import json, sys\n"
        "sys.modules['bpd_jax.cpu'] = None\n"
        "from tests.models.device_ops_test import decoded\n"
        "print(json.dumps(decoded()))\n"
        "assert not [name for name in sys.modules if name.startswith('bpd_jax.cpu.')]"
    )
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    with_package = decoded()
    assert json.loads(result.stdout) == with_package
    assert with_package[0] == with_package[1]


def test_options_that_xla_lacks_are_not_used(monkeypatch):
    options = {**device_ops.COMPILER_OPTIONS, "xla_cpu_no_such_option": True}
    monkeypatch.setattr(device_ops, "COMPILER_OPTIONS", options)
    used = device_ops.compiler_options()
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
    compiled = lowered.compile(device_ops.compiler_options(in_order=True))
    expanded = 4 * width**2
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * expanded
