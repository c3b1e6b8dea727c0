"""Random damage of n-gram models, counts, and token ids to count."""

import contextlib
import gzip
import json
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from bpd_jax.ngrams.counting import bounded_memory, sorted_runs
from bpd_jax.ngrams.counting.counts import NGramCounts, count_ngrams
from bpd_jax.ngrams.counting.sources import open_source
from bpd_jax.ngrams.counting.windows import Packing
from bpd_jax.ngrams.formats.arpa import write_arpa
from bpd_jax.ngrams.formats.fst_files import write_fst
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.formats.symbols import read_symbols, write_symbols
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.storage import _content_checksum
from tests.formats.registry import add
from tests.ngrams.helpers import Sequences


def _counts() -> NGramCounts:
    random = np.random.default_rng(0)
    return count_ngrams(random.integers(0, 9, (20, 12)).tolist(), order=3, vocab_size=9)


def _use(model: NGramModel) -> None:
    """Queries a model that was read, so that kernels use its arrays."""
    model.evaluate([[0, min(1, model.vocab_size - 1), 0]])
    model.context_sums()


def _read_ngrams(name: str = "") -> Callable[[pathlib.Path], None]:
    return lambda folder: _use(load_model(folder / name))


def _katz(write: Callable[[NGramModel, pathlib.Path], object], name: str) -> Any:
    return lambda folder: write(estimate_katz(_counts()), folder / name)


def _save_over(folder: pathlib.Path, save: Callable[[pathlib.Path], object]) -> None:
    """For writers that create the folder themselves."""
    folder.rmdir()
    save(folder)


def _reseal_arrays(folder: pathlib.Path) -> None:
    """Updates the checksums of n-gram arrays, where the arrays can be read."""
    path = next(folder.glob("ngram_*.json"))
    try:
        header = json.loads(path.read_bytes())
        for name, array_header in header["arrays"].items():
            array = np.load(folder / f"{name}.npy", allow_pickle=False)
            array_header["crc32"] = zlib.crc32(np.ascontiguousarray(array).data)
        header["crc32"] = _content_checksum(header)
        path.write_text(json.dumps(header))
    except Exception:  # It is damaged so that no checksum can fit.
        return


add("arpa", _katz(write_arpa, "m.arpa"), _read_ngrams("m.arpa"), "*.arpa")
add("arpa.gz", _katz(write_arpa, "m.arpa.gz"), _read_ngrams("m.arpa.gz"), "*.gz")
add("fst", _katz(write_fst, "m.fst"), _read_ngrams("m.fst"), "*.fst")
add(
    "symbols",
    lambda folder: write_symbols([f"w{i}" for i in range(30)], folder / "s.txt"),
    lambda folder: read_symbols(folder / "s.txt"),
    "*.txt",
)
add(
    "ngram_model",
    lambda folder: _save_over(folder, estimate_katz(_counts()).save),
    _read_ngrams(),
    "*",
    reseal=_reseal_arrays,
)
add(
    "ngram_counts",
    lambda folder: _save_over(folder, _counts().save),
    lambda folder: _use(estimate_katz(NGramCounts.load(folder))),
    "*",
    reseal=_reseal_arrays,
)


def _token_ids(name: str) -> Callable[[pathlib.Path], object]:
    def write(folder: pathlib.Path) -> None:
        tokens = np.random.default_rng(0).integers(0, 50, 200)
        data = " ".join(map(str, tokens)).replace(" 7 ", "\n").encode()
        if name.endswith(".npy"):
            np.save(folder / name, tokens.astype(np.uint16))
        else:
            (folder / name).write_bytes(gzip.compress(data) if "gz" in name else data)

    return write


def _read_token_ids(folder: pathlib.Path) -> None:
    (name,) = (path.name for path in folder.iterdir())
    source = open_source(tokens=str(folder / name), vocab_size=50)
    for stream, _, _ in bounded_memory.chunks(source, Packing(2, 50), 1 << 20):
        assert stream.min() >= 0


for name in ("token_ids.txt", "token_ids.txt.gz", "token_ids.npy"):
    add(name, _token_ids(name), _read_token_ids, "*")


def _count_sequences(folder: pathlib.Path, fail_after: int | None = None) -> list[int]:
    """Counts, or resumes a count; returns checksums of the result."""
    random = np.random.default_rng(0)
    sequences = random.integers(0, 9, (600, 200), dtype=np.int32)
    counts = bounded_memory.count(
        Sequences([*sequences], fail_after, vocab_size=9),
        folder,
        order=3,
        memory=1_000_000,
    )
    arrays = (*counts.keys, *counts.counts, *counts.followed)
    return [zlib.crc32(np.ascontiguousarray(array).data) for array in arrays]


def _interrupt_count(folder: pathlib.Path) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        _count_sequences(folder / "runs", fail_after=500)
    assert len(list(folder.glob("runs/run_*.windows"))) > 1
    with tempfile.TemporaryDirectory() as scratch:
        sums = _count_sequences(pathlib.Path(scratch))
    manifest = json.loads((folder / "runs" / sorted_runs.KIND.marker).read_text())
    intact = {"crc32": manifest["crc32"], "sums": sums}
    (folder / "intact.json").write_text(json.dumps(intact))


def _resume_count(folder: pathlib.Path) -> None:
    # A copy, because resuming adds runs.
    with tempfile.TemporaryDirectory() as scratch:
        runs = shutil.copytree(folder / "runs", pathlib.Path(scratch) / "runs")
        manifest = (runs / sorted_runs.KIND.marker).read_text(errors="replace")
        sums = _count_sequences(runs)
    intact = json.loads((folder / "intact.json").read_text())
    if f'"crc32": {intact["crc32"]}\n' in manifest:
        assert sums == intact["sums"], "the resumed count differs, with old checksums"


def _reseal_runs(folder: pathlib.Path) -> None:
    """Updates the checksums of the manifest and of the runs, where possible."""
    path = folder / "runs" / sorted_runs.KIND.marker
    try:
        content = json.loads(path.read_bytes())
        for run in content["runs"]:
            run["crc32"] = [
                zlib.crc32((folder / "runs" / f"{run['name']}.{end}").read_bytes())
                for end in ("windows", "counts")
            ]
        content["crc32"] = sorted_runs._content_checksum(content)
        path.write_text(json.dumps(content, indent=2) + "\n")
    except Exception:  # It is damaged so that no checksum can fit.
        return


add("count_runs", _interrupt_count, _resume_count, "runs/*", reseal=_reseal_runs)
