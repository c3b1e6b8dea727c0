"""Texts are the same by programs that this or another process has compiled."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from bpd_jax.base import compiled
from bpd_jax.base.compiled import keep_compiled
from bpd_jax.decoding import decode_loop
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.refill import decode_refilled
from bpd_jax.models import programs
from bpd_jax.models.programs import Program
from tests.decoding import random_models as random

ROOT = pathlib.Path(__file__).parent.parent.parent


def make_decoder():
    model = random.make_model(2, 4, 14, num_layers=1, max_length=64)
    return Decoder(model, width=3, assets=random.make_assets(model))


def decode():
    """Tokens of some methods: on the device, drawn with a small model, on the host."""
    decoder = make_decoder()
    prompts = random.make_prompts([2, 3, 4], 14)
    texts = []
    for name, options in (
        ("block+markov/tree:6", {"end_of_text": (3, 5)}),
        ("draft_model:2:drafts=2", {"temperature": 0.8, "seed": 3}),
        ("ngram_fst:3", {}),
    ):
        chosen = DecodeOptions(max_new_tokens=12, batch_size=2, **options)
        texts += [
            [text.output_ids.tolist(), text.accepted.tolist()]
            for text in decoder.decode(parse_method(name), prompts, chosen)
        ]
    task = decoder.task(parse_method("block/tree:4"), chosen)
    refilled = decode_refilled(task, prompts, range(3))
    return texts + [[index, text.tolist()] for index, text, _ in refilled]


def main():
    """Prints the texts, and the number of loops that were traced."""
    traced, look = [], decode_loop.look

    def counted(*arguments):
        traced.append(1)
        return look(*arguments)

    decode_loop.look = counted
    compiled.LEAST_SECONDS_WHOLE = 0.0
    keep_compiled()
    print(json.dumps([decode(), len(traced)]))


def test_texts_are_those_of_jit(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = "from tests.decoding.kept_programs_test import main; main()"
    first, again = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", program],
                check=True,
                cwd=ROOT,
                env=dict(os.environ),
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        )
        for _ in range(2)
    )
    texts, traced = first
    assert traced > 0
    assert again == [texts, 0]
    assert decode() == texts


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "greedy",
        "block+ngram/tree:6:price=1.5+lookup:3",
        "draft_model:2:drafts=2",
        "lookahead:4",
        "heads+markov/beam:2",
    ],
)
def test_programs_that_are_compiled_ahead_are_those_that_run(
    monkeypatch, name, on_disk
):
    monkeypatch.setattr(compiled, "_keeps", True)
    if not on_disk:  # As with source files that are newer than the process.
        monkeypatch.setattr(programs, "_sources", lambda: None)
    for forget in compiled.on_forget:
        forget()
    loaded, load = [], Program._load

    def counted(self, key, arguments):
        loaded.append(self._name)
        return load(self, key, arguments)

    monkeypatch.setattr(Program, "_load", counted)
    options = DecodeOptions(max_new_tokens=12, batch_size=2, temperature=0.5, seed=1)
    prompts = random.make_prompts([2, 3], 14)
    [*_, text] = make_decoder().decode(parse_method(name), prompts, options)
    assert len(text.output_ids) == 12
    assert sorted(loaded) == ["_first_state", "decode_on_device", "run_prompts"]
