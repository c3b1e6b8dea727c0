import json
import resource
import zlib

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams import storage
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel


def change_a_byte(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_truncation_is_detected_without_reading_the_arrays(trigrams, tmp_path):
    trigrams.save(tmp_path / "model")
    path = tmp_path / "model" / "log_probs_2.npy"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"log_probs_2\.npy"):
        NGramModel.load(tmp_path / "model", verify=False)


def test_a_compact_model_is_small_and_rounds_logarithms(trigrams, tmp_path):
    for name, compact in (("exact", False), ("compact", True)):
        (tmp_path / name).mkdir()
        trigrams.save_into(tmp_path / name, compact=compact)
    exact, rounded = (NGramModel.load(tmp_path / n) for n in ("exact", "compact"))
    assert exact.end_of_text == rounded.end_of_text
    for group in ("keys", "log_probs", "log_backoffs"):
        for a, b in zip(getattr(exact, group), getattr(rounded, group), strict=True):
            np.testing.assert_allclose(a, b, rtol=0 if group == "keys" else 2**-11)
            assert a.dtype == b.dtype
    exact_size, size = (
        sum(file.stat().st_size for file in (tmp_path / name).iterdir())
        for name in ("exact", "compact")
    )
    assert size < exact_size / 2
    change_a_byte(tmp_path / "compact" / storage.PACKED)
    with pytest.raises(UserError, match=storage.PACKED):
        NGramModel.load(tmp_path / "compact")


def test_incomplete_write_is_reported(tmp_path):
    # With a limit on file sizes, numpy's error states no reason.
    model = NGramModel(50_000, (np.arange(50_000),), (np.zeros(50_000),), ())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"model: .* written; the disk may be full"):
            model.save(tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def forge(folder, name, array):
    """Replaces an array and updates the checksums."""
    np.save(folder / f"{name}.npy", array)
    path = next(folder.glob("ngram_*.json"))
    header = json.loads(path.read_text())
    header["arrays"][name] = {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "crc32": zlib.crc32(np.ascontiguousarray(array).data) if array.size else 0,
    }
    header["crc32"] = storage._content_checksum(header)
    path.write_text(json.dumps(header))


@pytest.mark.parametrize(
    "kind, name, change",
    [
        ("model", "keys_1", lambda a: a[::-1].copy()),
        ("model", "keys_2", lambda a: np.insert(a, 0, -5)),
        ("model", "log_probs_2", lambda a: a[:-1]),
        ("model", "log_probs_1", lambda a: a * np.nan),
        ("model", "log_backoffs_1", lambda a: a - np.inf),
        ("model", "log_backoffs_9", lambda _: np.zeros(3)),
        ("counts", "counts_2", lambda a: -a),
        ("counts", "followed_1", lambda a: -a - 1),
    ],
)
def test_forged_arrays_are_refused(tmp_path, kind, name, change):
    counts = count_ngrams([[0, 1, 2], [0, 1]], order=2, vocab_size=3)
    original = counts if kind == "counts" else estimate_katz(counts)
    original.save(tmp_path / "made")
    type(original).load(tmp_path / "made")
    path = tmp_path / "made" / f"{name}.npy"
    forge(tmp_path / "made", name, change(np.load(path) if path.exists() else None))
    with pytest.raises(UserError, match=f"{name}"):
        type(original).load(tmp_path / "made")
