"""Safetensors files of other programs, whose tensors are read on demand."""

import os
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np
from safetensors import safe_open

from bpd_jax.base.errors import UserError, library_errors
from bpd_jax.decoding.pretrained_checkpoint import Origin, Path
from bpd_jax.formats.json_files import Fields
from bpd_jax.formats.nearest import nearest
from bpd_jax.storage.paths import as_path, local_copy

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# The longest file name in bytes on common systems.
_LONGEST_NAME = 255

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})


class SafetensorsFiles:
    """The tensors of several files of one folder, by name."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        paths: Iterable[pathlib.Path],
        places: Mapping[str, str] | None = None,
    ) -> None:
        """Opens the files and checks their headers; reads no tensor.

        `places` are the names of the files that the tensors are read from; other
        tensors of the files are ignored. By default each tensor is in one file.
        """
        self._folder = folder
        self._files = {}
        for path in paths:
            with library_errors(f"cannot read {path}, which may be incomplete"):
                file = safe_open(local_copy(path), "np")
                names = set(file.keys())
            if places is not None:
                listed = {name for name, place in places.items() if place == path.name}
                if missing := sorted(listed - names):
                    raise UserError(
                        f"{path} has no tensor {missing[0]}, which {INDEX} lists there."
                    )
                names = listed
            self._files.update(dict.fromkeys(names, file))

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def check(self, layout: Mapping[Path, Origin]) -> None:
        """Checks that all tensors of a layout exist; reads none."""
        for stacked in layout.values():
            for origin in stacked.parts or [stacked]:
                origin.check_shape(self.shape(origin.name))
                self._check_kind(origin.name, _FLOATS)

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in its own float type."""
        return self._read(name, _FLOATS)

    def read_quantized(self, name: str) -> None:
        """Files of floats have no quantized matrices."""

    def read_integers(self, name: str) -> np.ndarray:
        """Returns a tensor in its own integer type, or of booleans."""
        return self._read(name, _INTEGERS)

    def _read(self, name: str, kinds: frozenset[str]) -> np.ndarray:
        self._check_kind(name, kinds)
        with library_errors(f"cannot read tensor {name} of {self._folder}"):
            return self._file(name).get_tensor(name)

    def _check_kind(self, name: str, kinds: frozenset[str]) -> None:
        kind = self._file(name).get_slice(name).get_dtype()
        if kind not in kinds:
            expected = "floats" if kinds is _FLOATS else "integers"
            raise UserError(
                f"tensor {name} of {self._folder} is stored as {kind}, not as "
                f"{expected}: quantised safetensors files cannot be read; download the "
                "original model."
            )

    def _file(self, name: str) -> safe_open:
        if name not in self._files:
            raise UserError(
                f"{self._folder} has no tensor {name}: a file is missing, or its "
                "config.json belongs to another model."
            )
        return self._files[name]


def open_checkpoint(folder: str | os.PathLike[str]) -> SafetensorsFiles:
    """Opens the tensors of one checkpoint, which are in one file or in several."""
    folder = as_path(folder)
    if (folder / SINGLE).is_file():
        return SafetensorsFiles(folder, [folder / SINGLE])
    index = folder / INDEX
    if not index.is_file():
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
            raise UserError(
                f"{folder} has its tensors as pickled PyTorch files, which can run "
                f"code and are not read: convert them to {SINGLE}."
            )
        instead = nearest(folder)
        instead = f"; {instead}" if instead else ""
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{instead}.")
    places = dict(Fields.read(index).fields("weight_map").values)
    names = set()
    for name in places.values():
        # The index must not refer to files outside the folder.
        if (
            not isinstance(name, str)
            or pathlib.PurePath(name).name != (name or None)
            or len(os.fsencode(name)) > _LONGEST_NAME
        ):
            raise UserError(
                f"{index} lists {name!r}, which is not a file name in its folder."
            )
        names.add(name)
    for name in sorted(names):
        if not (folder / name).is_file():
            raise UserError(
                f"{folder} is incomplete: {name}, which {INDEX} lists, is missing."
            )
    return SafetensorsFiles(folder, [folder / name for name in sorted(names)], places)
