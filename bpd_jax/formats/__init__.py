"""Files of other programs: checkpoints, drafters and heads.

The functions below are what the core calls, through `other_formats` in
`bpd_jax.decoding.pretrained_checkpoint`. Each imports the modules of its format only.
"""

import contextlib
import os
import pathlib

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Params
from bpd_jax.decoding.pretrained_checkpoint import Checkpoint
from bpd_jax.models.attachment_files import LoadedDrafter
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.eagle import EagleFunctions


def is_model(path: pathlib.Path) -> bool:
    """Whether a model or drafter of another program is there: a file, or a folder."""
    return path.is_file() or (path / "config.json").is_file()


def from_hub(name: str) -> pathlib.Path | None:
    """A model of the Hugging Face hub; None if this is no name of one."""
    from bpd_jax.formats.hub import downloaded, is_hub_name

    return downloaded(name) if is_hub_name(name) else None


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Opens a pretrained checkpoint: a Hugging Face folder or a GGUF file."""
    if not path.is_dir() and path.suffix in (".json", ".safetensors"):
        raise UserError(
            f"{path} is one file of a Hugging Face folder: give the folder, "
            f"{path.parent}."
        )
    if path.is_dir():
        from bpd_jax.formats.huggingface import open_folder

        return open_folder(path)
    from bpd_jax.formats.gguf_model import open_gguf

    return open_gguf(path)


def check_folder(path: pathlib.Path) -> None:
    """Refuses a folder that has no model of bpd_jax either, and says where one is."""
    if (path / "model.json").is_file() or path.parent.name == "checkpoints":
        return
    from bpd_jax.formats.nearest import nearest

    instead = nearest(path) or (
        "give a Hugging Face folder, a GGUF file, or a run folder"
    )
    raise UserError(
        f"{path} is not the folder of a model: it has neither config.json (of "
        f"transformers) nor model.json (of a run of bpd_jax); {instead}."
    )


def joined_file(
    folder: str | os.PathLike[str],
) -> contextlib.AbstractContextManager[pathlib.Path]:
    """A file in parts, joined while the context lasts."""
    from bpd_jax.formats.file_parts import joined_file as joined

    return joined(folder)


def import_drafter(
    folder: str | os.PathLike[str],
    model: BlockwiseConfig,
    params: Params,
    *,
    name: str,
    base: str,
) -> LoadedDrafter:
    """Reads a published block drafter; see `drafter_import`."""
    from bpd_jax.formats.drafter_import import import_drafter as read

    return read(folder, model, params, name=name, base=base)


def import_eagle(
    folder: str | os.PathLike[str], model: BlockwiseConfig, params: Params, name: str
) -> tuple[EagleFunctions, Params]:
    """Reads a published EAGLE-3 drafter; see `drafter_import`."""
    from bpd_jax.formats.drafter_import import import_eagle as read

    return read(folder, model, params, name)
