"""The files of a checkpoint: opening a folder of them and reading one item.

Neither Orbax nor tensorstore compares checksums of arrays, so a flipped bit would load
as another weight. Therefore every checkpoint holds the digests of its files in
`digests.json`, written before the checkpoint counts as whole: SHA-256 on a disk, and
under gs:// the MD5 that the bucket keeps of every object, so that nothing is downloaded
to compute or to compare them.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils.epath import gpath

from bpd_jax import buckets, files
from bpd_jax.buckets import BucketPath
from bpd_jax.errors import UserError
from bpd_jax.models.stacking import is_stacked
from bpd_jax.training.distributed import first
from bpd_jax.training.quiet_saves import quiet_saves
from bpd_jax.typing import PyTree

# In the names that Orbax gives to checkpoints while it writes them.
TORN = "orbax-checkpoint-tmp"
# Under gs://, where nothing can be renamed, Orbax writes this file last.
_COMMITTED = "commit_success.txt"
DIGESTS = "digests.json"
_READERS = 4  # files hashed at once
_LEAST_SLICE = 1 << 20  # bytes


def whole_steps(folder: pathlib.Path) -> list[int]:
    """Steps of the checkpoints in a folder, by their names."""
    if isinstance(folder, BucketPath):
        whole = (path.parent.name for path in folder.glob(f"*/{_COMMITTED}"))
        return sorted(int(name) for name in whole if name.isdigit())
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdigit()]


def reason(error: BaseException) -> str:
    """What the system said, if it was the system; else the first line of the error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # As tensorstore ends its account of what it was doing.
    system = re.search(r"os_error_code='(\d+)'", str(error))
    if system is not None:
        return os.strerror(int(system[1]))
    return str(error).strip().partition("\n")[0][:200]


def layers_are_stacked(
    manager: ocp.CheckpointManager, folder: pathlib.Path, step: int
) -> bool:
    """Whether a checkpoint holds its layers stacked; see `stacking`."""
    with _reading(folder / str(step) / "params"):
        return is_stacked(_description(manager, step, "params")["trunk"])


def open_folder(folder: pathlib.Path, **options: Any) -> ocp.CheckpointManager:
    """Orbax's manager of a folder of checkpoints of ours, with its options."""
    quiet_saves()
    _write_small_arrays_whole()
    if isinstance(folder, BucketPath):
        _reach_buckets()
    return ocp.CheckpointManager(
        str(folder),
        options=ocp.CheckpointManagerOptions(**options),
        # Named here, so that metadata can be read before anything is saved.
        item_handlers={
            "params": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "data": ocp.JsonCheckpointHandler(),
        },
    )


@functools.cache
def _reach_buckets() -> None:
    """Lets Orbax use gcsfs and tensorstore under gs://.

    Where TensorFlow is installed too, `epath` would take its client, which no storage
    emulator can stand in for, and which asks for credentials of its own.
    """
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator:
        os.environ.setdefault("TENSORSTORE_GCS_HTTP_URL", emulator)
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(
            "checkpoints under gs:// need the extra gcs (gcsfs is missing): pip "
            "install 'bpd_jax[gcs]'."
        )
    gpath._is_tf_installed = lambda: False


@functools.cache
def _write_small_arrays_whole() -> None:
    """Lets one device write an array that many hold, unless it is large.

    By default each of them writes a slice, and jax compiles a program for each slice,
    which takes seconds at the first save.
    """
    handler = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_LEAST_SLICE
    )
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def read_item(
    manager: ocp.CheckpointManager,
    folder: pathlib.Path,
    step: int,
    item: str,
    abstract: PyTree | None = None,
) -> Any:
    """Reads one item of a checkpoint, after a look at the shapes it holds.

    Args:
      manager: of `open_folder`.
      folder: that it manages.
      step: which checkpoint.
      item: `params`, `optimizer` or `data`.
      abstract: shapes and shardings of the arrays; None for `data`, which is JSON.

    Raises:
      UserError: it is broken, or of other shapes.
    """
    place = folder / str(step) / item
    first(lambda: _check_digests(place))
    with _reading(place):
        if abstract is None:
            how = ocp.args.JsonRestore()
        else:
            _check_shapes(place, _description(manager, step, item), abstract)
            how = ocp.args.StandardRestore(abstract)
        return manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]


def _description(manager: ocp.CheckpointManager, step: int, item: str) -> PyTree:
    """Shapes of the arrays of an item."""
    saved = manager.item_metadata(step)[item]
    if saved is None:
        raise ValueError("its description is missing or broken")
    return saved.tree


def write_digests(checkpoint: pathlib.Path) -> None:
    """Writes the digests of all files of a checkpoint into it.

    Raises:
      OSError: a file cannot be read, or that of the digests not written.
    """
    algorithm = "md5" if isinstance(checkpoint, BucketPath) else "sha256"
    digests = _digests(checkpoint, checkpoint, algorithm)
    text = json.dumps({algorithm: digests}, indent=1) + "\n"
    path = checkpoint / DIGESTS
    if isinstance(path, BucketPath):
        path.write_generation(text.encode())
    else:
        path.write_text(text, encoding="utf-8")


def _check_digests(place: pathlib.Path) -> None:
    """Raises a `UserError` unless the files of an item are those that were saved.

    A checkpoint of an earlier version has no digests and is not checked.
    """
    checkpoint = place.parent
    if not (checkpoint / DIGESTS).exists():
        return
    with _reading(place):
        content = files.read_json(checkpoint / DIGESTS)
        algorithm = "md5" if "md5" in content else "sha256"
        saved = content[algorithm]
        prefix = f"{place.name}/"
        wanted = {name: saved[name] for name in saved if name.startswith(prefix)}
        present = _digests(place, checkpoint, algorithm)
        for name in sorted(wanted.keys() | present.keys()):
            if name not in present:
                raise ValueError(f"{name} is missing")
            if wanted.get(name) != present[name]:
                raise ValueError(f"{name} is not what was saved")


def _digests(
    top: pathlib.Path, checkpoint: pathlib.Path, algorithm: str
) -> dict[str, str]:
    """Digests of the files below `top`, by their paths within the checkpoint."""
    known: dict[pathlib.Path, str | None] = {}
    if isinstance(top, BucketPath):
        sums = buckets.md5_sums(top)
        known = {path: md5 if algorithm == "md5" else None for path, md5 in sums}
    else:
        known = dict.fromkeys(path for path in top.rglob("*") if path.is_file())

    def digest(path: pathlib.Path) -> str:
        found = known[path]
        if found is not None:
            return found
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, algorithm).hexdigest()

    paths = sorted(known)
    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        found = list(pool.map(digest, paths))
    names = (path.relative_to(checkpoint).as_posix() for path in paths)
    return dict(zip(names, found, strict=True))


@contextlib.contextmanager
def _reading(place: pathlib.Path) -> Iterator[None]:
    """Names the item of a checkpoint that cannot be read."""
    try:
        yield
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # The checkpoint may be sound: nobody should be told to remove it.
    except Exception as error:  # Orbax raises that class itself for a damaged array.
        raise UserError(
            f"cannot read the checkpoint {place}: {reason(error)}; remove the folder "
            f"{place.parent} to go back to the checkpoint before it."
        ) from error


def _check_shapes(folder: pathlib.Path, saved: PyTree, abstract: PyTree) -> None:
    def shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            "/".join(_key(entry) for entry in path): tuple(leaf.shape)
            for path, leaf in leaves
        }

    theirs, mine = shapes(saved), shapes(abstract)
    for name in sorted(theirs.keys() | mine.keys()):
        if theirs.get(name) != mine.get(name):
            raise UserError(
                f"the checkpoint {folder} does not fit: {name} is "
                f"{theirs.get(name, 'missing')} there and {mine.get(name, 'missing')} "
                "in this configuration; use the configuration of that run."
            )


def _key(entry: Any) -> str:
    """The name of a path entry, the same for a named tuple and the dict saved of it."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    raise TypeError(f"unknown path entry {entry!r}")
