"""The files of checkpoints: Orbax's manager, reading of one item, and digests.

Neither Orbax nor tensorstore verifies checksums of arrays, so a flipped bit would load
as another weight. Therefore every checkpoint contains the digests of its files in
`digests.json`, written before the checkpoint is committed: SHA-256 on a disk, and under
gs:// the MD5 that the bucket stores for every object, so that nothing is downloaded to
compute or verify it.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import PyTree
from bpd_jax.models.attachments import by_path
from bpd_jax.models.layers import is_stacked
from bpd_jax.storage import files
from bpd_jax.storage.paths import DiskPath, in_bucket, objects
from bpd_jax.training.hosts import first
from bpd_jax.training.run_names import whole_steps

# Part of the name of a checkpoint folder while Orbax writes it.
TORN = "orbax-checkpoint-tmp"
_DESCRIPTION = "_CHECKPOINT_METADATA"
DIGESTS = "digests.json"
_READERS = 4  # files hashed at once
_LEAST_SLICE = 1 << 20  # bytes


def reason(error: BaseException) -> str:
    """The operating system's reason for an error, or else the error's first line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # tensorstore appends the system's error code to its message.
    system = re.search(r"os_error_code='(\d+)'", str(error))
    if system is not None:
        return os.strerror(int(system[1]))
    return str(error).strip().partition("\n")[0][:200]


def layers_are_stacked(
    manager: ocp.CheckpointManager, folder: pathlib.Path, step: int
) -> bool:
    """Whether a checkpoint holds its layers stacked; see `stack_layers`."""
    with _reading(folder / str(step) / "params"):
        return is_stacked(_description(manager, step, "params")["trunk"])


def open_folder(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
    """Orbax's manager of a folder, with options of `CheckpointManagerOptions`."""
    _quiet_saves()
    # By default every device writes a slice of a replicated array, and jax compiles a
    # program for each slice, which takes seconds at the first save.
    whole = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_LEAST_SLICE
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, whole))
    arrays = ocp.PyTreeCheckpointHandler
    by_number = "\\" in str(folder)
    place: Any = str(folder) if in_bucket(folder) else DiskPath(folder)
    if by_number:
        # tensorstore takes a backslash for a slash.
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        place = DiskPath(f"/proc/self/fd/{descriptor}")
    try:
        manager = ocp.CheckpointManager(
            place,
            options=ocp.CheckpointManagerOptions(**options),
            # With handlers, metadata can be read before anything is saved.
            item_handlers={
                "params": arrays(type_handler_registry=registry),
                "optimizer": arrays(type_handler_registry=registry),
                "data": ocp.JsonCheckpointHandler(),
            },
        )
        if by_number:
            weakref.finalize(manager, os.close, descriptor)
        return manager
    except Exception:  # Orbax accepts some damage of a description, but not all.
        for step in whole_steps(folder):
            path = folder / str(step) / _DESCRIPTION
            if path.exists():
                with _reading(path):
                    files.read_json(path)
        raise


@functools.cache
def _quiet_saves() -> None:
    """Suppresses Orbax's tracebacks, in every thread, of errors that it then raises.

    Of the arrays that cannot be written, it raises the error of one. Those of the
    others are logged by asyncio, or find its loop closed.
    """
    logging.getLogger("absl").addFilter(lambda line: "orbax" not in line.pathname)
    logging.getLogger("asyncio").addFilter(
        lambda line: "exception was never retrieved" not in line.getMessage()
    )
    report = sys.unraisablehook

    def filtered(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = filtered


def read_item(
    manager: ocp.CheckpointManager,
    folder: pathlib.Path,
    step: int,
    item: str,
    abstract: PyTree | None = None,
) -> Any:
    """Reads one item of a checkpoint after checking its digests and shapes.

    The item is `params` or `optimizer`, with the shapes and shardings of `abstract`, or
    `data`, which is JSON.
    """
    path = folder / str(step) / item
    first(lambda: _check_digests(path))
    with _reading(path):
        if abstract is None:
            restore = ocp.args.JsonRestore()
        else:
            _check_shapes(path, _description(manager, step, item), abstract)
            restore = ocp.args.PyTreeRestore(
                abstract,
                restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            )
        return manager.restore(step, args=ocp.args.Composite(**{item: restore}))[item]


def _description(manager: ocp.CheckpointManager, step: int, item: str) -> PyTree:
    """The tree of shapes of an item, from its metadata."""
    saved = manager.item_metadata(step)[item]
    if saved is None:
        raise ValueError("its metadata are missing or damaged")
    return saved.tree


def write_digests(checkpoint: pathlib.Path) -> None:
    """Writes the digests of all files of a checkpoint into it."""
    algorithm = "md5" if in_bucket(checkpoint) else "sha256"
    digests = _digests(checkpoint, checkpoint, algorithm)
    text = json.dumps({algorithm: digests}, indent=1) + "\n"
    (checkpoint / DIGESTS).write_bytes(text.encode())


def _check_digests(path: pathlib.Path) -> None:
    """Checks that the files of an item have the saved digests."""
    checkpoint = path.parent
    # Earlier versions wrote none.
    if not (checkpoint / DIGESTS).exists():
        return
    with _reading(path):
        content = files.read_json(checkpoint / DIGESTS)
        algorithm = "md5" if "md5" in content else "sha256"
        saved = content[algorithm]
        prefix = f"{path.name}/"
        expected = {name: saved[name] for name in saved if name.startswith(prefix)}
        actual = _digests(path, checkpoint, algorithm)
        changed = sorted(dict(expected.items() ^ actual.items()))
        if changed:
            raise ValueError(f"{changed[0]} has changed since it was saved")


def _digests(
    top: pathlib.Path, checkpoint: pathlib.Path, algorithm: str
) -> dict[str, str]:
    """Digests of the files below `top` by path relative to the checkpoint."""
    stored: dict[pathlib.Path, str | None]
    if in_bucket(top):
        stored = {top / name: md5 for name, md5 in objects(top).items()}
    else:
        stored = dict.fromkeys(path for path in top.rglob("*") if path.is_file())

    def compute(path: pathlib.Path) -> str:
        if algorithm == "md5" and (digest := stored[path]) is not None:
            return digest
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, algorithm).hexdigest()

    paths = sorted(stored)
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(compute, paths))
    names = (path.relative_to(checkpoint).as_posix() for path in paths)
    return dict(zip(names, digests, strict=True))


@contextlib.contextmanager
def _reading(path: pathlib.Path) -> Iterator[None]:
    """Turns errors of reading an item of a checkpoint into a `UserError`."""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # The checkpoint may be intact: do not advise to remove it.
    except Exception as error:  # Orbax raises `Exception` itself for a damaged array.
        raise UserError(
            f"cannot read the checkpoint {path}: {reason(error)}; remove the folder "
            f"{path.parent} to go back to the previous checkpoint."
        ) from error


def _check_shapes(folder: pathlib.Path, saved: PyTree, abstract: PyTree) -> None:
    # The names are equal for a named tuple and the dict that is saved from it.
    stored, expected = (
        {name: tuple(x.shape) for name, x in by_path(tree).items()}
        for tree in (saved, abstract)
    )
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            raise UserError(
                f"the checkpoint {folder} does not fit: the shape of {name} is "
                f"{stored.get(name, 'missing')} there and "
                f"{expected.get(name, 'missing')} in this configuration; use the "
                "configuration of that run."
            )
