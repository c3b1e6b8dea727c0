import shutil

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data import row_shards
from bpd_jax.data import rows as rows_file
from bpd_jax.data.row_shards import shard_name
from bpd_jax.data.rows import RowIterator, open_rows
from tests.data.row_files import save_indices

SIZES = (3, 5, 1, 4)


def write_shard(folder, first, size):
    mask = np.tile([False, False, True, False], (size, 1))
    about = {"fingerprint": {"length": 4, "shard": [first, 4]}}
    about |= {"cut": {"inputs": size, "tokens": 1}}
    save_indices(folder, size, first, loss_mask=mask, **about)


@pytest.fixture
def folder(tmp_path):
    first = 0
    for index, size in enumerate(SIZES):
        write_shard(tmp_path / "rows" / shard_name(index, 4), first, size)
        first += size
    return tmp_path / "rows"


def test_shards_open_as_one_folder_of_rows(folder):
    rows = open_rows(folder)
    assert len(rows) == 13
    assert rows.folder == folder
    assert (rows.num_tokens, rows.num_documents) == (39, 26)
    assert rows.waste == 0.25
    assert rows.fingerprint == {"length": 4}
    assert rows.truncation == {"inputs": 13, "tokens": 4}
    batch = rows.batch(np.array([12, 3, 7, 8, 3]))
    assert batch.tokens[:, 0].tolist() == [12, 3, 7, 8, 3]
    assert batch.loss_mask.tolist() == [[False, False, True, False]] * 5
    assert rows.batch(slice(None)).tokens[:, 0].tolist() == list(range(13))
    assert rows.batch(slice(2, 4)).tokens[:, 0].tolist() == [2, 3]
    with pytest.raises(IndexError):
        rows.batch(np.array([13]))


def test_number_of_open_files_is_limited(folder, monkeypatch):
    monkeypatch.setattr(row_shards, "_MAX_OPEN_FILES", 2)
    rows = open_rows(folder)
    assert not rows.tokens._open
    for _ in range(2):
        assert rows.batch(slice(None)).tokens[:, 0].tolist() == list(range(13))
        assert len(rows.tokens._open) == 2


def test_large_corpora_are_shuffled_without_a_table(folder, monkeypatch):
    rows = open_rows(folder)
    with_table = next(RowIterator(rows, 13, 5)).tokens[:, 0].tolist()
    monkeypatch.setattr(rows_file, "_MAX_TABLE_ROWS", 12)
    iterator = RowIterator(rows, 26, 5)
    order = next(iterator).tokens[:, 0].tolist()
    assert sorted(order[:13]) == sorted(order[13:]) == list(range(13))
    assert order[:13] != order[13:]
    assert order[:13] != with_table
    # Batches that do not divide an epoch, after resuming, on several processes.
    parts = [RowIterator(rows, 4, 5, index, 2) for index in range(2)]
    resumed = []
    for _ in range(6):
        state = parts[0].state()
        parts = [RowIterator(rows, 4, 5, index, 2) for index in range(2)]
        for part in parts:
            part.restore(state)
            resumed += next(part).tokens[:, 0].tolist()
    assert resumed == order[:24]


def test_order_of_few_rows_is_numpys_permutation(folder):
    order = np.random.default_rng((5, 0)).permutation(13)
    batch = next(RowIterator(open_rows(folder), 13, 5))
    assert batch.tokens[:, 0].tolist() == order.tolist()


def test_incomplete_or_inconsistent_shards_are_refused(folder):
    shutil.rmtree(folder / shard_name(1, 4))
    with pytest.raises(UserError, match=r"lacks 1 of 4 shards, .* shard-00001-of-"):
        open_rows(folder)
    write_shard(folder / shard_name(1, 4), 0, 2)
    header = folder / shard_name(1, 4) / "rows.json"
    header.write_text(header.read_text().replace('"length": 4, "s', '"length": 5, "s'))
    with pytest.raises(UserError, match=r"does not belong to .*length is 5 here and 4"):
        open_rows(folder)
    write_shard(folder / shard_name(0, 2), 0, 2)
    with pytest.raises(UserError, match="holds shards of 2 and of 4"):
        open_rows(folder)


def test_host_copies_only_the_shards_of_its_rows(folder, storage, monkeypatch):
    upload(storage, folder)
    for host, selection, shards in (
        ("a", slice(0, 8), {0, 1}),
        ("b", np.array([8, 12, 8]), {2, 3}),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent / host))
        storage.requests.clear()
        rows = open_rows("gs://bpd-test/rows")
        batch, local = rows.batch(selection), open_rows(folder).batch(selection)
        for name, array in batch._asdict().items():
            np.testing.assert_array_equal(array, getattr(local, name))
        copied = [name for name in storage.downloads() if name.endswith(".npy")]
        assert sorted(copied) == sorted(
            f"rows/{shard_name(index, 4)}/{name}.npy"
            for index in shards
            for name in ("tokens", "segment_ids", "loss_mask")
        )
        rows.batch(selection)
        assert len(copied) == len(
            [name for name in storage.downloads() if name.endswith(".npy")]
        )


def test_shard_of_wrong_size_is_refused_before_copying(folder, storage):
    path = folder / shard_name(1, 4) / "tokens.npy"
    np.save(path, np.load(path)[:-1])
    upload(storage, folder)
    storage.requests.clear()
    with pytest.raises(UserError, match=r"shard-00001.*prepare it again"):
        open_rows("gs://bpd-test/rows")
    assert not [name for name in storage.downloads() if name.endswith(".npy")]


def upload(storage, folder):
    """Uploads the local rows to the bucket."""
    storage.objects["bpd-test"].clear()
    for path in folder.rglob("*.*"):
        name = path.relative_to(folder.parent).as_posix()
        storage.put("bpd-test", name, path.read_bytes())
