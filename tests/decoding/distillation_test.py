"""Distillation: order, shards, resuming, generated prompts."""

import dataclasses

import numpy as np
import pytest

from bpd_jax.base import compiled
from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import (
    open_generations,
    shard_paths,
    write_header,
    write_shard,
)
from bpd_jax.decoding import refill
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.distillation import (
    answered_prompts,
    conversation_opening,
    distill,
    generate_prompts,
    recording_states,
)
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.training.heads import states_files
from bpd_jax.training.heads.frozen_states import FrozenModel
from bpd_jax.training.heads.states_cache import cached_states
from bpd_jax.training.heads.states_files import About, StatesWriter
from tests.decoding.random_models import make_drafter, make_model, make_prompts

OPTIONS = DecodeOptions(max_new_tokens=9, end_of_text=0, batch_size=3)
PROMPTS = make_prompts([5, 2, 9, 2, 7, 4, 3])


def header_of(width, layers, include_prompts=True):
    return About("b", width, layers, "float16", "float32", include_prompts)


class Stopped(Exception):
    """Raised to stop a run."""


def stopping_after(texts):
    """A callback that stops a run after some texts, and the list of its calls."""
    counts = []

    def stop(tokens):
        counts.append(tokens)
        if len(counts) == texts:
            raise Stopped

    return stop, counts


def texts_of(folder):
    texts = open_generations(folder)
    return {
        int(index): (texts[row][:length].tolist(), texts[row][length:].tolist())
        for row, (index, length) in enumerate(
            zip(texts.indices, texts.prompt_lengths, strict=True)
        )
    }


@pytest.mark.parametrize(
    "method, layers, include_prompts",
    [
        # The drafter reads layer 0, too, and its cache grows with the prompts.
        ("block/tree:4", (1, 0), True),
        ("greedy", (), False),
        pytest.param("bpd", (0,), True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_run_resumes_with_texts_and_their_states(
    tmp_path, monkeypatch, method, layers, include_prompts
):
    """Sampled, so that the texts depend on the indices of their prompts.

    No state is computed again: those of texts that were lost are forgotten.
    """
    monkeypatch.setattr(refill, "_SHORTEST", 8)
    monkeypatch.setattr(compiled, "_STEP", 8)
    # Blocks of 12 states.
    monkeypatch.setattr(states_files, "_BLOCK_BYTES", 12 * 2 * 16 * (1 + len(layers)))
    model = make_model()
    drafter = make_drafter(model, window=None)
    decoder = Decoder(model, width=4, assets=Assets(drafter=drafter))
    options = dataclasses.replace(OPTIONS, temperature=1.5)
    decoded = decoder.task(parse_method(method), options)
    task = recording_states(decoded, 9, layers, np.dtype(np.float16))
    header = header_of(16, layers, include_prompts)
    texts, states = tmp_path / "texts", tmp_path / "states"
    write_header(texts, base="b", vocab_size=13, facts={})
    stop, counts = stopping_after(5)
    order = np.random.default_rng(0).permutation(len(PROMPTS)).tolist()
    with pytest.raises(Stopped):
        distill(
            task,
            PROMPTS,
            order,
            texts,
            states=StatesWriter(states, header, None),
            texts_per_shard=2,
            on_progress=stop,
        )
    done = answered_prompts(PROMPTS, texts)
    # The fifth text was in a shard that was not full.
    assert len(done) == 4 == len(open_generations(texts))
    writer = StatesWriter(states, header, open_generations(texts))
    remaining = [index for index in order if index not in done]
    distill(task, PROMPTS, remaining, texts, states=writer, texts_per_shard=2)
    assert len(shard_paths(texts)) == 4
    found = texts_of(texts)
    assert found == {
        index: (text.input_ids.tolist(), text.output_ids.tolist())
        for index, text in enumerate(decoder.decode(GREEDY, PROMPTS, options))
    }
    assert sum(counts[:4]) == sum(len(found[index][1]) for index in done)
    assert {path.name for path in states.iterdir()} == {"states.npy", "states.json"}

    computed = []
    original_states = FrozenModel.states

    def counted(self, some):
        computed.append(len(some))
        yield from original_states(self, some)

    monkeypatch.setattr(FrozenModel, "states", counted)
    base = FrozenModel(model.config, model.params, 64, "float16", layers)
    generations = open_generations(texts)
    parts = [
        cached_states(folder, generations, base, "b", include_prompts=include_prompts)
        for folder in (states, tmp_path / "again")
    ]
    assert sum(computed) == len(PROMPTS)
    indices = np.arange(len(parts[0].positions))
    np.testing.assert_allclose(
        parts[0].read(indices), parts[1].read(indices), rtol=2e-3, atol=2e-3
    )


def test_shards_of_another_command_are_noticed(tmp_path):
    task = Decoder(make_model(), width=4).task(GREEDY, OPTIONS)
    write_header(tmp_path, base="b", vocab_size=13, facts={})

    def meanwhile(tokens):
        write_shard(tmp_path, 0, [PROMPTS[4]], [7], [4])

    with pytest.raises(UserError, match="another command has written to"):
        distill(task, PROMPTS, [0], tmp_path, on_progress=meanwhile)
    assert answered_prompts(PROMPTS, tmp_path) == {4}


def test_shards_without_indices_are_identified_by_their_prompts(tmp_path):
    write_header(tmp_path, base="b", vocab_size=13, facts={})
    assert answered_prompts(PROMPTS, tmp_path) == set()
    write_shard(tmp_path, 0, [PROMPTS[4], PROMPTS[0]], [7, 5])
    assert answered_prompts(PROMPTS, tmp_path) == {0, 4}
    # A repeated prompt is answered as often as it is in the shards.
    assert answered_prompts([PROMPTS[4], *PROMPTS], tmp_path) == {0, 1}


def test_indices_of_other_prompts_do_not_count(tmp_path):
    write_header(tmp_path, base="b", vocab_size=13, facts={})
    write_shard(tmp_path, 0, [PROMPTS[4], np.array([12, 12], np.int32)], [7, 2], [1, 2])
    assert answered_prompts(PROMPTS, tmp_path) == {1, 2}
    assert answered_prompts(PROMPTS, tmp_path, same_prompts=False) == {4}


def test_generated_prompts_differ_and_exclude_the_end_token():
    options = dataclasses.replace(OPTIONS, temperature=1.5, max_new_tokens=20)
    task = Decoder(make_model(), width=4).task(GREEDY, options)
    opening = np.array([3, 4], np.int32)
    counts = []
    prompts = generate_prompts(task, opening, 5, 8, counts.append)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 5
    assert sum(counts) == 5
    for prompt in prompts:
        assert 0 not in prompt
        assert 4 <= len(prompt) < 20
    repeated = generate_prompts(task, opening, 5, 8)
    assert [prompt.tolist() for prompt in repeated] == [
        prompt.tolist() for prompt in prompts
    ]


def test_repeated_prompts_are_an_error():
    # Greedy decoding generates the same prompt every time.
    task = Decoder(make_model(), width=4).task(GREEDY, OPTIONS)
    with pytest.raises(UserError, match=r"generated [01] prompts, and then no new"):
        generate_prompts(task, np.array([3], np.int32), 2, 2)


def test_an_opening_ends_before_the_message_of_the_user():
    def render(message: str) -> str:
        return f"<|system|>be kind<|user|>{message}<|assistant|>"

    assert conversation_opening(render) == "<|system|>be kind<|user|>"


def test_space_of_states(tmp_path):
    """In half precision, 1,500 numbers for each position."""
    prompts = 2 * [np.zeros(500_001, np.int32)]
    writer = StatesWriter(tmp_path / "states", header_of(500, (1, 2)), None)
    line = writer.describe_size(prompts, new_tokens=10**6)
    assert line.startswith(f"states: at most 9.0 GB; {tmp_path} has ")
