"""Generated texts on disk: the training data of heads and block drafters.

A folder contains a header, `distill.json`, and shards `shard-00000.npz`, …, with the
arrays `tokens`, `offsets`, `prompt_lengths` and `indices` of `Generations`. Shards of
earlier versions lack `indices`. A shard may be compressed by xz (`shard-00000.npz.xz`),
which leaves a sixth of its size.
"""

import dataclasses
import io
import lzma
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import ArraySpec, read_npz
from bpd_jax.storage import files
from bpd_jax.storage.folders import Artifact
from bpd_jax.storage.paths import as_path, local_copy

HEADER = "distill.json"
PACKED = ".xz"
KIND = Artifact(
    "generated texts",
    HEADER,
    text='"base"',
    in_place=True,
    remedy="generate them again with python -m bpd_jax.distill",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Generations:
    """All texts of a folder.

    Attributes:
      folder: the folder.
      tokens: `[N]` int32, all texts concatenated.
      offsets: `[R+1]` int64: text r is `tokens[offsets[r]:offsets[r+1]]`.
      prompt_lengths: `[R]` int32, number of tokens of each text's prompt, with which
        the text begins.
      base: fingerprint of the model that generated the texts (`models.attachments`).
      vocab_size: V of that model.
      facts: command, versions and settings of the generation, as JSON values.
      indices: `[R]` int64, index of each prompt among all prompts; -1 if unknown.
    """

    folder: pathlib.Path
    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    base: str
    vocab_size: int
    facts: dict[str, Any]
    indices: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        """Tokens of one text, with its prompt."""
        return self.tokens[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """`[R]` int64: number of tokens of every text, with its prompt."""
        return np.diff(self.offsets)


def write_header(
    folder: str | os.PathLike[str],
    *,
    base: str,
    vocab_size: int,
    facts: Mapping[str, Any],
) -> None:
    """Writes `distill.json`; see `Generations` for the arguments."""
    header = {"base": base, "vocab_size": vocab_size, "facts": dict(facts)}
    KIND.write_header(folder, header)


def pack(parts: Sequence[Generations], folder: str | os.PathLike[str]) -> pathlib.Path:
    """Writes all texts of some folders as one compressed shard; returns its path.

    The header of `folder` must have been written (`write_header`).
    """
    stream = io.BytesIO()
    arrays = _shard_arrays(
        [part[row] for part in parts for row in range(len(part))],
        np.concatenate([part.prompt_lengths for part in parts]),
    )
    np.savez(stream, **arrays)
    path = as_path(folder) / (shard_name(0) + PACKED)
    with files.replacing_file(path) as temporary:
        preset = 9 | lzma.PRESET_EXTREME
        temporary.write_bytes(lzma.compress(stream.getvalue(), preset=preset))
    return path


def write_shard(
    folder: str | os.PathLike[str],
    index: int,
    texts: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    indices: Sequence[int] | None = None,
) -> pathlib.Path:
    """Writes texts as shard `index` (from 0), atomically; returns its path.

    Args:
      folder: folder of the generations; created if missing.
      index: index of the shard; an existing one is replaced.
      texts: tokens of each text, which begins with its prompt.
      prompt_lengths: number of tokens of each prompt.
      indices: index of each prompt among all prompts; None if unknown.
    """
    path = as_path(folder) / shard_name(index)
    files.write_npz(path, _shard_arrays(texts, prompt_lengths, indices))
    return path


def _shard_arrays(
    texts: Sequence[np.ndarray],
    prompt_lengths: Sequence[int] | np.ndarray,
    indices: Sequence[int] | None = None,
) -> dict[str, Any]:
    lengths = [len(text) for text in texts]
    assert all(0 <= p <= n for p, n in zip(prompt_lengths, lengths, strict=True))
    indices = [-1] * len(texts) if indices is None else indices
    return {
        "tokens": np.concatenate([np.zeros(0, np.int32), *texts]).astype(np.int32),
        "offsets": np.cumsum([0, *lengths]).astype(np.int64),
        "prompt_lengths": np.asarray(prompt_lengths, np.int32),
        "indices": np.asarray(indices, np.int64),
    }


def shard_name(index: int) -> str:
    """File name of a shard.

    >>> [shard_name(index) for index in (0, 12, 123456)]
    ['shard-00000.npz', 'shard-00012.npz', 'shard-123456.npz']
    """
    return f"shard-{index:05d}.npz"


def shard_paths(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The paths of all shards, in the order of their indices."""
    numbered = {}
    for path in as_path(folder).glob("shard-*.npz*"):
        name = path.name.removesuffix(PACKED)
        number = name.removeprefix("shard-").removesuffix(".npz")
        if number.isdecimal() and name == shard_name(int(number)):
            numbered[int(number)] = path
    return [numbered[number] for number in sorted(numbered)]


def next_shard(folder: str | os.PathLike[str]) -> int:
    """The index of the next shard to write."""
    paths = shard_paths(folder)
    if not paths:
        return 0
    return int(paths[-1].name.removeprefix("shard-").partition(".")[0]) + 1


def open_generations(folder: str | os.PathLike[str]) -> Generations:
    """Reads all texts of a folder into memory, four bytes per token."""
    folder = as_path(folder)
    header = read_header(folder)
    paths = shard_paths(folder)
    if not paths:
        raise UserError(f"{folder} holds no texts (shard-00000.npz, …): {KIND.remedy}.")
    specs, shards = specs_of_texts(header["vocab_size"]), []
    for path in paths:
        with KIND.reading(path):
            source: pathlib.Path | io.BytesIO = local_copy(path)
            if path.suffix == PACKED:
                source = io.BytesIO(files.read_xz(path))
            shard = read_npz(source, specs, optional=("indices",))
            shard.setdefault("indices", np.full(len(shard["prompt_lengths"]), -1))
            if not fit_together(**shard):
                raise ValueError("its offsets do not match its texts")
        shards.append(shard)
    lengths = [np.diff(shard["offsets"]) for shard in shards]
    return Generations(
        folder=folder,
        tokens=np.concatenate([shard["tokens"] for shard in shards]),
        offsets=np.cumsum(np.concatenate([[0], *lengths])),
        prompt_lengths=np.concatenate([shard["prompt_lengths"] for shard in shards]),
        indices=np.concatenate([shard["indices"] for shard in shards]),
        base=header["base"],
        vocab_size=header["vocab_size"],
        facts=header["facts"],
    )


def read_header(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of `distill.json`: format, base, vocab_size, facts."""
    return KIND.read_header(folder, {"base": str, "vocab_size": int, "facts": dict})


def specs_of_texts(vocab_size: int | None) -> dict[str, ArraySpec]:
    """The required shapes, types and values of the arrays; see `Generations`.

    V is None if it is unknown.
    """
    highest = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    return {
        "tokens": ArraySpec(("<i4",), (None,), 0, highest),
        "offsets": ArraySpec(("<i8",), (None,), 0),
        "prompt_lengths": ArraySpec(("<i4",), (None,), 0),
        "indices": ArraySpec(("<i8",), (None,), -1),
    }


def fit_together(
    tokens: np.ndarray,
    offsets: np.ndarray,
    prompt_lengths: np.ndarray,
    indices: np.ndarray | None = None,
) -> bool:
    """Whether offsets, tokens and prompt lengths are consistent."""
    return bool(
        len(offsets) == len(prompt_lengths) + 1
        and (indices is None or len(indices) == len(prompt_lengths))
        and offsets[0] == 0
        and offsets[-1] == len(tokens)
        and (np.diff(offsets) >= prompt_lengths).all()
    )
