import pathlib

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import (
    next_shard,
    open_generations,
    pack,
    shard_name,
    shard_paths,
    write_header,
    write_shard,
)

TEXTS = [np.array([1, 2, 3, 4]), np.array([5, 6]), np.array([7, 3, 3])]
PROMPTS = [2, 2, 0]


def write(folder: pathlib.Path) -> None:
    write_header(folder, base="abc", vocab_size=9, facts={"end": 1})
    write_shard(folder, 0, TEXTS[:2], PROMPTS[:2])
    write_shard(folder, 1, TEXTS[2:], PROMPTS[2:])


def test_shards_are_read_as_one(tmp_path):
    write(tmp_path)
    generations = open_generations(tmp_path)
    assert len(generations) == 3
    assert [generations[row].tolist() for row in range(3)] == [
        t.tolist() for t in TEXTS
    ]
    assert generations.tokens.dtype == np.int32
    assert generations.prompt_lengths.tolist() == PROMPTS
    assert generations.lengths.tolist() == [4, 2, 3]
    assert (generations.base, generations.vocab_size) == ("abc", 9)
    assert generations.facts == {"end": 1}
    # A shard may be replaced, and may be empty.
    write_shard(tmp_path, 0, [], [])
    assert open_generations(tmp_path).lengths.tolist() == [3]


def test_packed_texts_are_those_of_all_folders(tmp_path):
    write(tmp_path / "one")
    write_header(tmp_path / "two", base="abc", vocab_size=9, facts={})
    write_shard(tmp_path / "two", 0, [np.array([8, 8, 1])], [1])
    parts = [open_generations(tmp_path / name) for name in ("one", "two")]
    write_header(tmp_path / "both", base="abc", vocab_size=9, facts={})
    path = pack(parts, tmp_path / "both")
    assert [p.name for p in shard_paths(tmp_path / "both")] == ["shard-00000.npz.xz"]
    assert next_shard(tmp_path / "both") == 1
    both = open_generations(tmp_path / "both")
    texts = [*TEXTS, np.array([8, 8, 1])]
    assert [both[row].tolist() for row in range(4)] == [text.tolist() for text in texts]
    assert both.prompt_lengths.tolist() == [*PROMPTS, 1]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"shard-00000\.npz\.xz"):
        open_generations(tmp_path / "both")


def test_shards_are_in_the_order_of_their_indices(tmp_path):
    numbers = [9, 10, 99_999, 100_000, 1_000_000]
    write_header(tmp_path, base="abc", vocab_size=9, facts={})
    for number in reversed(numbers):
        write_shard(tmp_path, number, [np.array([number % 7])], [0])
    for name in ("shard-1.npz", "shard-000001.npz", "shard-part.npz"):
        (tmp_path / name).touch()
    names = [path.name for path in shard_paths(tmp_path)]
    assert names == [shard_name(number) for number in numbers]
    generations = open_generations(tmp_path)
    assert generations.tokens.tolist() == [number % 7 for number in numbers]


def test_invalid_folders_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"distill\.json is missing"):
        open_generations(tmp_path)
    write_header(tmp_path, base="abc", vocab_size=9, facts={})
    with pytest.raises(UserError, match="holds no texts"):
        open_generations(tmp_path)
    path = write_shard(tmp_path, 0, [np.array([9])], [0])
    with pytest.raises(UserError, match="above 8"):
        open_generations(tmp_path)
    arrays = {"tokens": np.int32([1]), "prompt_lengths": np.int32([0])}
    np.savez(path, offsets=[0, 2], **arrays)
    with pytest.raises(UserError, match="do not match"):
        open_generations(tmp_path)
