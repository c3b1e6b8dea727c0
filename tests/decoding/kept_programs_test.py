"""Texts are the same by programs that this or another process has compiled."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent

PROCESS = """
import json
import numpy as np
from bpd_jax.base import compiled
from bpd_jax.base.compiled import keep_compiled
from bpd_jax.decoding import decode_loop
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.refill import decode_refilled
from bpd_jax.drafting.assets import Assets
from tests.decoding import random_models as random

traced, look = [], decode_loop.look

def counted(*arguments):
    traced.append(1)
    return look(*arguments)

decode_loop.look = counted
compiled._LEAST_SECONDS = 0.0
keep_compiled()
model = random.make_model(2, 4, 14, num_layers=1, max_length=64)
assets = Assets(
    ngram=random.make_ngram(14),
    draft_model=random.make_model(3, 1, 14, num_layers=1, max_length=80),
    markov=random.make_refiner("markov", 14),
    drafter=random.make_drafter(model, seed=5),
    eagle=random.make_eagle(model),
)
decoder = Decoder(model, width=3, assets=assets)
rng = np.random.default_rng(0)
prompts = [rng.integers(1, 14, 2 + n).astype(np.int32) for n in range(3)]
texts = {}
for name, options in (
    ("greedy", {}),
    ("greedy", {"temperature": 0.8, "seed": 3}),
    ("heads/tree:6+lookup:3", {}),
    ("block+markov/tree:6", {"end_of_text": (3, 5)}),
    ("block/tree:4:price=1.2", {}),
    ("eagle:2", {}),
    ("draft_model:2:drafts=2", {"temperature": 0.8, "seed": 3}),
    ("ngram_fst:3", {}),
):
    chosen = DecodeOptions(max_new_tokens=12, batch_size=2, **options)
    found = decoder.decode(parse_method(name), prompts, chosen)
    texts[f"{name} {options}"] = [
        [text.output_ids.tolist(), text.accepted.tolist()] for text in found
    ]
task = decoder.task(parse_method("block/tree:4"), chosen)
texts["refilled"] = [
    [index, text.tolist()]
    for index, text, _ in decode_refilled(task, prompts, range(3))
]
print(json.dumps([texts, len(traced)]))
"""


def run(**variables):
    """Texts by method, and the number of loops that were traced."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        check=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def test_texts_are_those_of_jit(tmp_path, monkeypatch):
    by_jit, _ = run(JAX_COMPILATION_CACHE_DIR="")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    first, traced = run(XDG_CACHE_HOME=str(tmp_path))
    again, traced_again = run(XDG_CACHE_HOME=str(tmp_path))
    assert len(by_jit) == 9
    assert by_jit == first == again
    assert (traced, traced_again) == (8, 0)
