"""The files of a cache of states: one array that grows, and JSON beside it.

`states.npy` has the states of texts, one after another, and is memory-mapped.
`states.json` identifies the model, and lists the blocks of texts whose states are
there, each with a digest of its texts: a run that is killed loses one block at most.
`texts.npz` has the texts when their states are complete.
"""

import dataclasses
import hashlib
import io
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import open_npy, read_npz
from bpd_jax.base.settings import Natural, Validated, choice
from bpd_jax.data.generations import Generations, fit_together, specs_of_texts
from bpd_jax.models.transformer_config import Size
from bpd_jax.storage import files, folders
from bpd_jax.storage.folders import Artifact
from bpd_jax.storage.paths import as_path, in_bucket, local_copy
from bpd_jax.training.heads.frozen_states import check_finite, states_dtype

HEADER, TEXTS, _STATES = "states.json", "texts.npz", "states.npy"
KIND = Artifact(
    "cached states",
    HEADER,
    in_place=True,
    remedy="remove the folder, and train heads with HeadsTrainConfig.mode = 'cache'",
    version=2,
)

# Bytes of a block, which is computed in memory.
_BLOCK_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class About(Validated):
    """What the states of a cache are of; see `FrozenModel` and `cached_states`.

    Attributes:
      base: fingerprint of the model.
      d_model: its width.
      layers: layers whose outputs follow the final hidden state.
      dtype: of the states.
      products: precision of the model's matrix products.
      include_prompts: whether states of the tokens of prompts are stored.
    """

    base: str
    d_model: Size
    layers: tuple[Natural, ...]
    dtype: Annotated[str, choice("float16", "bfloat16")]
    products: str
    include_prompts: bool

    @property
    def width(self) -> int:
        """C, numbers of a state."""
        return self.d_model * (1 + len(self.layers))


@dataclasses.dataclass(frozen=True)
class Block(Validated):
    """Some texts whose states are stored: their number, their states, a digest."""

    texts: Natural
    states: Natural
    digest: str


class StatesFile:
    """The states of texts in a folder, to which those of further texts are added."""

    def __init__(
        self, folder: str | os.PathLike[str], about: About | None = None
    ) -> None:
        """Opens a folder that is `about` this, or a new one, or any existing one."""
        self.folder = as_path(folder)
        if in_bucket(self.folder):
            raise UserError(
                f"{self.folder}: states are memory-mapped: choose a folder on a local "
                "disk."
            )
        if about is not None:
            folders.check_folder(self.folder, KIND)
        self.blocks: list[Block] = []
        if about is None or (self.folder / HEADER).exists():
            stored, self.blocks = _read_header(self.folder)
            self.about = stored
            self.check(**dataclasses.asdict(about or stored))
        else:
            self.about = about
        self.width = self.about.width

    def check(self, **about: Any) -> None:
        """Checks fields of `About`."""
        for name, value in about.items():
            stored = getattr(self.about, name)
            if stored != value:
                raise UserError(
                    f"{self.folder} holds states with {name} = {stored!r}, and this "
                    f"run needs {value!r}: choose another folder, or remove this one."
                )

    @property
    def full_block(self) -> int:
        """Number of states from which on a block is written."""
        return max(1, _BLOCK_BYTES // (2 * self.width))

    @property
    def texts(self) -> int:
        """Number of texts whose states are stored."""
        return sum(block.texts for block in self.blocks)

    def check_begins(self, texts: Generations, *, longer: bool = False) -> None:
        """Checks that the stored states are those of the first texts.

        If `longer`, blocks may be of more texts than there are; they are forgotten.
        """
        first = 0
        for number, block in enumerate(self.blocks):
            last = first + block.texts
            if longer and last > len(texts):
                del self.blocks[number:]
                return
            rows = range(first, min(last, len(texts)))
            lengths = texts.prompt_lengths[rows.start : rows.stop]
            if block.digest != _digest([texts[row] for row in rows], lengths):
                raise UserError(
                    f"{self.folder} holds states of other texts than those of "
                    f"{texts.folder}: choose another folder with "
                    "HeadsTrainConfig.states, or remove this one."
                )
            first = last

    def append(
        self,
        texts: Sequence[np.ndarray],
        prompt_lengths: Sequence[int] | np.ndarray,
        states: np.ndarray,
    ) -> None:
        """Writes a block: the states `[N, C]` of texts, in order."""
        self._write_header()  # The folder is one of states before it has any.
        path, before = self.folder / _STATES, sum(block.states for block in self.blocks)
        path.touch()
        with files.os_errors_as_user_errors(path), path.open("r+b") as stream:
            # Its length does not depend on the number of rows.
            header = _npy_header((before + len(states), self.width))
            stream.seek(len(header) + 2 * self.width * before)
            stream.truncate()
            stream.write(np.ascontiguousarray(states).view(np.uint16).tobytes())
            stream.seek(0)
            stream.write(header)
            stream.flush()
            os.fsync(stream.fileno())
        block = Block(len(texts), len(states), _digest(texts, prompt_lengths))
        self.blocks.append(block)
        self._write_header()

    def _write_header(self) -> None:
        blocks = [dataclasses.asdict(block) for block in self.blocks]
        about = dataclasses.asdict(self.about)
        KIND.write_header(self.folder, {**about, "blocks": blocks})

    def array(self) -> np.ndarray:
        """All states, `[N, C]`, memory-mapped."""
        path, rows = self.folder / _STATES, sum(block.states for block in self.blocks)
        with KIND.reading(path):
            array = open_npy(path)
            wanted = len(array) >= rows and array.shape[1:] == (self.width,)
            if not wanted or array.dtype != np.uint16:
                raise ValueError("it is of another shape")
        # .npy files have no bfloat16, so both dtypes are stored as uint16 bit patterns.
        return array[:rows].view(states_dtype(self.about.dtype))


def _read_header(folder: pathlib.Path) -> tuple[About, list[Block]]:
    """The description of a cache and its blocks, whose types are checked."""
    header = KIND.read_header(folder, {"blocks": list})
    with KIND.reading(folder / HEADER):
        names = [field.name for field in dataclasses.fields(About)]
        about = About(**{name: header[name] for name in names})
        return about, [Block(**block) for block in header["blocks"]]


def stored_about(folder: pathlib.Path) -> About | None:
    """The description of a cache; None if there is none or it cannot be read."""
    try:
        return _read_header(folder)[0]
    except UserError:
        return None


def read_texts(folder: pathlib.Path, base: str) -> Generations:
    """Reads the texts of a complete cache."""
    with KIND.reading(folder / TEXTS):
        arrays = read_npz(
            local_copy(folder / TEXTS), specs_of_texts(None), optional=("indices",)
        )
        if not fit_together(**arrays):
            raise ValueError("its texts do not match their offsets")
    return Generations(folder, **arrays, base=base, vocab_size=0, facts={})


def _digest(
    texts: Sequence[np.ndarray], prompt_lengths: Sequence[int] | np.ndarray
) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.int64(len(text)).tobytes())
        digest.update(np.asarray(text, np.int32).tobytes())
    digest.update(np.asarray(prompt_lengths, np.int64).tobytes())
    return digest.hexdigest()[:16]


def _npy_header(shape: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    facts = {"descr": "<u2", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, facts)
    return stream.getvalue()


def cache_bytes(positions: int, width: int) -> int:
    return 2 * positions * width


def free_bytes(folder: pathlib.Path) -> tuple[int, pathlib.Path]:
    """Free bytes on the disk of a folder, and its nearest existing parent or itself."""
    nearest = next(
        p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()
    )
    return shutil.disk_usage(nearest).free, nearest


class StatesWriter:
    """Writes the states of texts in the order in which the texts are generated.

    Where texts exist whose states are not stored, those of later ones are not either:
    `cached_states` computes all that are missing.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        about: About,
        texts: Generations | None,
    ) -> None:
        """Continues a cache after the texts that exist already. Writes nothing."""
        self._file = StatesFile(folder, about)
        count = 0 if texts is None else len(texts)
        if texts is not None:
            self._file.check_begins(texts, longer=True)
        elif (self._file.folder / TEXTS).exists():
            raise UserError(
                f"{self._file.folder} holds states of other texts: choose another "
                "folder, or remove this one."
            )
        else:  # Of a run that was killed before it wrote its first texts.
            self._file.blocks.clear()
        self._follows = self._file.texts == count
        self._texts: list[np.ndarray] = []
        self._prompt_lengths: list[int] = []
        self._states: list[np.ndarray] = []

    def describe_size(self, prompts: Sequence[np.ndarray], new_tokens: int) -> str:
        """One line: the space that states of the texts take, and what is free."""
        positions = len(prompts) * new_tokens
        if self._file.about.include_prompts:
            positions += sum(len(prompt) - 1 for prompt in prompts)
        needed = cache_bytes(positions, self._file.width)
        free, nearest = free_bytes(self._file.folder)
        return (
            f"states: at most {needed / 1e9:,.1f} GB; {nearest} has {free / 1e9:,.1f} "
            "GB free."
        )

    def add(self, text: np.ndarray, prompt_length: int, states: np.ndarray) -> None:
        """Adds a text.

        `states`, `[T, C]`, are those after its tokens, of which that of the last one is
        not needed.
        """
        skipped = max(prompt_length - 1, 0)
        if self._file.about.include_prompts:
            skipped = 0
        # A copy: `states` may have room for a longer text.
        kept = states[skipped : len(text) - 1].copy()
        check_finite(kept)
        self._texts.append(text)
        self._prompt_lengths.append(prompt_length)
        self._states.append(kept)
        if sum(map(len, self._states)) >= self._file.full_block:
            self.flush()

    def flush(self) -> None:
        """Writes what was added; call it before the texts are written."""
        if self._texts and self._follows:
            states = np.concatenate(self._states)
            self._file.append(self._texts, self._prompt_lengths, states)
        self._texts, self._prompt_lengths, self._states = [], [], []
