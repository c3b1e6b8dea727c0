"""Models of the Hugging Face hub, by name.

`ORG/NAME`, `ORG/NAME@REVISION`, or `ORG/NAME/FILE.gguf` for one file. The library
huggingface_hub downloads and keeps them: its variables hold here, such as `HF_TOKEN`,
`HF_HOME` and `HF_HUB_OFFLINE`.
"""

import pathlib
import re
import sys

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError

_NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w./-]+))?"
)
# What a model's folder is read from; not the same weights in other formats.
_FILES = ["*.json", "*.safetensors", "*.jinja"]


def is_hub_name(name: str) -> bool:
    """Whether a name has the form of a model of the hub.

    What begins with a folder that is here, or with `runs`, is a path with a mistake.
    """
    begin = name.partition("/")[0]
    is_path = begin == "runs" or pathlib.Path(begin).exists()
    return _NAME.fullmatch(name) is not None and not is_path


def downloaded(name: str) -> pathlib.Path:
    """The folder or file of a model of the hub, which is downloaded unless it is kept.

    Folders of drafters inside a repository are left out.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{name} is not a local folder; to download it from the Hugging Face hub, "
            "pip install huggingface_hub."
        ) from error
    repo, revision = match["repo"], match["revision"]
    progress.say(f"{name}: from the Hugging Face hub, or its cache", sys.stderr)
    try:
        if match["file"]:
            file = huggingface_hub.hf_hub_download(
                repo, match["file"], revision=revision
            )
            return pathlib.Path(file)
        # A pattern without a folder would match files of subfolders, too.
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=_FILES, ignore_patterns=["*/*"]
        )
    except Exception as error:  # Of the network, the hub, or the library's cache.
        raise UserError(
            f"{name} is not a local folder, and cannot be downloaded from the Hugging "
            f"Face hub: {_reason(error)}"
        ) from error
    return pathlib.Path(folder)


def _reason(error: Exception) -> str:
    """What a user can do about an error of the library, in one sentence."""
    match type(error).__name__:
        case "GatedRepoError":
            return "it is gated; accept its terms there, and set HF_TOKEN."
        case "RepositoryNotFoundError":
            return "there is none of this name, or it is private; set HF_TOKEN then."
        case "RevisionNotFoundError":
            return "it has no such revision."
        case "RemoteEntryNotFoundError" | "EntryNotFoundError":
            return "it has no such file."
        case "LocalEntryNotFoundError" | "OfflineModeIsEnabled":
            return "the hub cannot be reached, and the model is not in the cache."
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0].rstrip('.')}."
