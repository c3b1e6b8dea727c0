"""Models built as Llama is decode like any other: without loss."""

import numpy as np
import pytest

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import BATCHED, TREE, DecodeOptions
from bpd_jax.models.rotary import RotaryConfig

LLAMA = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "max_length": 64,
    "activation": "silu",
    "gated": True,
    "use_bias": False,
    "norm": "rms",
    "rotary": RotaryConfig(100.0, 1.0, "llama3", 8.0, 16),
    "tied_softmax": False,
}


@pytest.mark.parametrize(
    "name, options",
    [
        pytest.param(
            *("bpd", {"batch_size": 1, "verification": BATCHED}),
            marks=pytest.mark.exhaustive,
        ),
        ("medusa:8", {"batch_size": 4, "verification": TREE}),
    ],
)
def test_drafts_change_no_token(make_model, make_prompts, name, options):
    tokens = calls = 0
    for seed in range(2):
        functions, params = make_model(seed, block_size=4, **LLAMA)
        decoder = Decoder(functions, params, width=3)
        prompts = make_prompts([3, 24, 9, 1], seed=seed)
        chosen = DecodeOptions(max_new_tokens=20, seed=seed, **options)
        reference = decoder.decode(parse_method("greedy"), prompts, chosen)
        outputs = decoder.decode(parse_method(name), prompts, chosen)
        for got, want in zip(outputs, reference, strict=True):
            np.testing.assert_array_equal(got.output_ids, want.output_ids)
            tokens += len(got.output_ids)
            calls += got.serial_calls
    # Some of what was drafted was right.
    assert calls < tokens
