import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax.base.errors import UserError
from bpd_jax.data.row_shards import Permutation
from bpd_jax.data.rows import Batch, RowIterator, open_rows, segment_positions
from bpd_jax.storage.paths import as_path
from tests.data.row_files import save_indices


def write_rows(folder, rows=10):
    save_indices(folder, rows)
    return open_rows(folder)


@pytest.fixture
def rows(tmp_path):
    return write_rows(tmp_path / "rows")


def first_tokens(batch):
    return batch.tokens[:, 0].tolist()


def test_fields_of_a_batch(rows):
    batch = rows.batch(np.array([3, 1]))
    assert isinstance(batch, Batch)
    assert batch.tokens.tolist() == [[3, 103, 203, 303], [1, 101, 201, 301]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 0]] * 2
    assert batch.positions.tolist() == [[0, 1, 0, 0]] * 2
    assert batch.loss_mask.tolist() == [[True, True, True, False]] * 2
    assert [field.dtype for field in batch] == [np.int32, np.int32, np.int32, np.bool_]
    assert len(rows) == 10
    assert rows.waste == 0.25


@given(lengths=st.lists(st.integers(1, 5), max_size=6), padding=st.integers(0, 3))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_positions_restart_in_each_segment(lengths, padding):
    segments = [s for s, n in enumerate(lengths, start=1) for _ in range(n)]
    expected = [position for n in lengths for position in range(n)]
    row = np.array(segments + [0] * padding, np.int32)
    if row.size == 0:
        return
    positions = segment_positions(row[None])[0]
    assert positions.tolist() == expected + [0] * padding


def test_every_epoch_visits_every_row_in_another_order(rows):
    iterator = RowIterator(rows, 4, seed=7)
    order = [row for _ in range(5) for row in first_tokens(next(iterator))]
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    repeated = RowIterator(rows, 4, seed=7)
    assert order == [row for _ in range(5) for row in first_tokens(next(repeated))]
    reseeded = RowIterator(rows, 10, seed=8)
    assert first_tokens(next(reseeded)) != order[:10]


@given(steps=st.integers(0, 30), batch_size=st.sampled_from([2, 4, 14]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_restored_iterator_continues(tmp_path_factory, steps, batch_size):
    rows = write_rows(tmp_path_factory.mktemp("rows"))
    iterator = RowIterator(rows, batch_size, seed=3)
    for _ in range(steps):
        next(iterator)
    state = json.loads(json.dumps(iterator.state()))
    restored = RowIterator(rows, batch_size, seed=3)
    restored.restore(state)
    for _ in range(4):
        for a, b in zip(next(iterator), next(restored), strict=True):
            np.testing.assert_array_equal(a, b)
    assert iterator.state() == restored.state()


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_processes_divide_the_batch(rows, count):
    complete = RowIterator(rows, 6, seed=1)
    parts = [RowIterator(rows, 6, 1, index, count) for index in range(count)]
    for _ in range(5):
        expected = next(complete)
        batches = [next(part) for part in parts]
        assert all(len(part.tokens) == 6 // count for part in batches)
        for name in Batch._fields:
            joined = np.concatenate([getattr(part, name) for part in batches])
            np.testing.assert_array_equal(joined, getattr(expected, name))
    assert all(part.state() == complete.state() for part in parts)


def test_processes_divide_batches_from_a_bucket_by_position(tmp_path):
    """Batches have the same rows, and a process reads little more than its part."""
    length, size, count = 1 << 14, 512, 8
    work_place = write_rows(tmp_path / "rows", rows=length)
    rows = dataclasses.replace(work_place, folder=as_path("gs://bpd-test/rows"))
    complete = RowIterator(work_place, size, seed=1)
    parts = [RowIterator(rows, size, 1, index, count) for index in range(count)]
    read = [set() for _ in range(count)]
    for step in range(2 * length // size):
        if step == 5:  # Resumes with another iterator.
            for index, part in enumerate(parts):
                parts[index] = RowIterator(rows, size, 1, index, count)
                parts[index].restore(part.state())
        tokens_of_parts = [first_tokens(next(part)) for part in parts]
        assert [*itertools.chain(*tokens_of_parts)] == sorted(
            first_tokens(next(complete))
        )
        for shards, tokens in zip(read, tokens_of_parts, strict=True):
            assert len(tokens) == size // count
            shards.update(token * 64 // length for token in tokens)
    # There are 64 shards; an eighth is 8.
    assert max(map(len, read)) <= 20
    assert set.union(*read) == set(range(64))


def test_state_of_other_rows_is_refused(rows, tmp_path):
    iterator = RowIterator(rows, 2, seed=3)
    other_rows = write_rows(tmp_path / "other", rows=11)
    with pytest.raises(UserError, match="rows was 11 and is 10"):
        iterator.restore(RowIterator(other_rows, 2, seed=3).state())
    with pytest.raises(UserError, match="seed was 4 and is 3"):
        iterator.restore(RowIterator(rows, 2, seed=4).state())
    with pytest.raises(UserError, match="given was None"):
        iterator.restore({})


def test_folders_without_rows_are_refused(rows):
    empty = dataclasses.replace(rows, tokens=rows.tokens[:0])
    with pytest.raises(UserError, match="holds no rows"):
        RowIterator(empty, 2, 0)


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 9))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_every_number_of_a_permutation_occurs_once(size, seed, epoch):
    elements = Permutation(size, (seed, epoch))(np.arange(size))
    assert elements.dtype == np.int64
    assert sorted(elements.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [400_000_000, 2**40 + 1])
def test_large_permutation_has_distinct_and_spread_elements(size):
    positions = np.arange(200_000)
    elements = Permutation(size, (1, 0))(positions)
    assert len(np.unique(elements)) == len(positions)
    assert elements.min() >= 0
    assert elements.max() < size
    counts, _ = np.histogram(elements, 100, (0, size))
    # A uniform sample has a mean of 2,000 and a standard deviation of 45.
    assert abs(counts - 2000).max() < 250
    correlation = np.corrcoef(elements[1:], elements[:-1])[0, 1]
    assert abs(correlation) < 0.01
