"""A model's own texts: grouping, writing, going on, made-up prompts."""

import dataclasses
import itertools

import numpy as np
import pytest

from bpd_jax.data.generations import open_generations, shard_paths, write_header
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.distillation import (
    chunks_of,
    continue_prompts,
    distill,
    make_up_prompts,
    opening_of,
    padded_length,
)
from bpd_jax.decoding.methods import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.errors import UserError

OPTIONS = DecodeOptions(max_new_tokens=9, end_of_text=0, batch_size=3)
LENGTHS = [5, 2, 9, 2, 7, 4, 3]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 13, length).astype(np.int32) for length in LENGTHS]


def test_padding_grows_by_halves_and_holds_the_length():
    sizes = [padded_length(length) for length in range(1, 5000)]
    assert all(size >= length for length, size in enumerate(sizes, 1))
    shapes = sorted(set(sizes))
    assert all(b <= 1.67 * a for a, b in itertools.pairwise(shapes))
    assert len(shapes) < 14


def test_chunks_hold_every_prompt_once_with_those_of_like_length(prompts):
    chunks = chunks_of(prompts, 3, seed=1)
    assert [chunk.shard for chunk in chunks] == [0, 1, 2]
    lengths = [[LENGTHS[index] for index in chunk.indices] for chunk in chunks]
    assert sorted(lengths) == [[2, 2, 3], [4, 5, 7], [9]]
    indices = itertools.chain.from_iterable(chunk.indices for chunk in chunks)
    assert sorted(indices) == list(range(7))
    assert chunks_of(prompts, 3, seed=1) == chunks


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("method", ["greedy", "bpd"])
def test_shards_hold_what_decoding_says(model, prompts, tmp_path, method, temperature):
    options = dataclasses.replace(OPTIONS, temperature=temperature)
    decoder = Decoder(model.functions, model.params, width=4)
    plain = decoder.decode(GREEDY, prompts, options)
    texts = {(tuple(text.input_ids), tuple(text.output_ids)) for text in plain}
    chunks = chunks_of(prompts, 3, seed=0)
    write_header(tmp_path, base="b", vocab_size=13, facts={})
    told = []
    task = decoder.task(parse_method(method), options)
    distill(task, prompts, chunks, 3, tmp_path, told.append)
    found = open_generations(tmp_path)
    assert {
        (tuple(found[row][:length]), tuple(found[row][length:]))
        for row, length in enumerate(found.prompt_lengths)
    } == texts
    assert sum(told) == sum(len(text.output_ids) for text in plain)


def test_a_run_goes_on_where_it_was_stopped(model, prompts, tmp_path):
    chunks = chunks_of(prompts, 3, seed=0)
    task = Decoder(model.functions, model.params, width=4).task(GREEDY, OPTIONS)
    distill(task, prompts, chunks, 3, tmp_path)
    whole = [path.read_bytes() for path in shard_paths(tmp_path)]
    kept = shard_paths(tmp_path)[1].stat().st_mtime_ns
    shard_paths(tmp_path)[2].unlink()
    shard_paths(tmp_path)[0].unlink()
    told = []
    distill(task, prompts, chunks, 3, tmp_path, told.append)
    assert len(told) == 2
    assert [path.read_bytes() for path in shard_paths(tmp_path)] == whole
    assert shard_paths(tmp_path)[1].stat().st_mtime_ns == kept


def test_made_up_prompts_differ_and_end_before_their_end_token(model):
    options = dataclasses.replace(OPTIONS, temperature=1.5, max_new_tokens=20)
    task = Decoder(model.functions, model.params, width=4).task(GREEDY, options)
    opening = np.array([3, 4], np.int32)
    told = []
    found = make_up_prompts(task, opening, 5, 8, told.append)
    assert len({tuple(words) for words in found}) == len(found) == 5
    assert sum(told) == 5
    for words in found:
        assert 0 not in words
        assert 4 <= len(words) < 20
    again = make_up_prompts(task, opening, 5, 8)
    assert [words.tolist() for words in again] == [words.tolist() for words in found]


def test_a_model_without_ideas_is_told(model):
    # Greedily it says the same every time.
    task = Decoder(model.functions, model.params, width=4).task(GREEDY, OPTIONS)
    with pytest.raises(UserError, match=r"made up [01] prompts, and then none"):
        make_up_prompts(task, np.array([3], np.int32), 2, 2)


def test_a_batch_may_have_fewer_prompts_than_rows(model, prompts):
    task = Decoder(model.functions, model.params, width=4).task(GREEDY, OPTIONS)
    [alone] = continue_prompts(task, prompts, [2], 1, 64)
    [among] = continue_prompts(task, prompts, [2], 3, 64)
    assert alone.tolist() == among.tolist()


def test_an_opening_ends_where_the_user_would_speak():
    def render(words: str) -> str:
        return f"<|system|>be kind<|user|>{words}<|assistant|>"

    assert opening_of(render) == "<|system|>be kind<|user|>"
