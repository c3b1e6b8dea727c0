"""From a name on the command line to a model that decodes."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from bpd_jax import files
from bpd_jax.buckets import as_path
from bpd_jax.data.example_task import DataTask, task_from_json
from bpd_jax.data.prompts import held_out_prompts
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.conversation import Chat
from bpd_jax.errors import UserError
from bpd_jax.models import attention_kernel
from bpd_jax.models.attachments import fingerprint
from bpd_jax.models.blockwise import BlockwiseConfig
from bpd_jax.models.cache import BITS
from bpd_jax.models.config import load_config
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.models.heads_files import HEADER, LoadedHeads, attach_heads, load_heads
from bpd_jax.models.products import cast_matrices, decoding_layout
from bpd_jax.pretrained.packaged_models import PACKAGED, find_packaged
from bpd_jax.pretrained.pretrained_checkpoint import Checkpoint
from bpd_jax.typing import Params

# Models of our own that `--model` knows, and where `make` puts them.
KNOWN_RUNS = {"demo": "runs/demo"}

# What belongs to a pretrained model: the package's own first, then the user's.
SHIPPED = pathlib.Path(__file__).resolve().parent.parent / "shipped"
RUNS = pathlib.Path("runs")

# Block heads, in one of a model's own folders.
HEADS = "heads"

Message = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model, ready to decode.

    Attributes:
      name: for people.
      folder: of its run; what is measured or reported on it goes there.
      functions: its functions.
      params: its parameters.
      tokenizer: its tokenizer.
      end_tokens: that end its texts; the first is the usual one.
      task: the text it was trained on; None for a pretrained one.
      begin_of_text: token that its texts begin with, or None.
      chat: how it holds conversations; None if it just continues texts.
      shelves: folders that may hold what its methods draft with.
      accuracies: of its heads, as they were when they were trained; see `Assets`.
      heads_identity: of its heads, as `LoadedHeads` has it; None where the heads, if
        any, belong to the run itself.
      trunk_identity: its `fingerprint`, where the layout of its parameters has changed.
    """

    name: str
    folder: pathlib.Path
    functions: ModelFunctions
    params: Params
    tokenizer: Tokenizer
    end_tokens: tuple[int, ...]
    task: DataTask | None = None
    begin_of_text: int | None = None
    chat: Chat | None = None
    shelves: tuple[pathlib.Path, ...] = ()
    accuracies: tuple[tuple[float, ...], ...] | None = None
    heads_identity: str | None = None
    trunk_identity: str | None = None

    @property
    def fingerprint(self) -> str:
        """Tells its trunk from another; see `attachments.fingerprint`."""
        return self.trunk_identity or fingerprint(self.functions.config, self.params)

    @property
    def vocab_size(self) -> int:
        """V of the model; its tokenizer may leave the last ids unused."""
        return self.functions.config.trunk.vocab_size

    @property
    def end_of_text(self) -> int | tuple[int, ...]:
        """What decoding options call `end_of_text`."""
        return self.end_tokens[0] if len(self.end_tokens) == 1 else self.end_tokens

    def own(self, name: str) -> pathlib.Path | None:
        """Where the model keeps something of its own; None if it has none."""
        for shelf in self.shelves:
            if (shelf / name).exists():
                return shelf / name
        return None

    def token_bytes(self) -> list[bytes]:
        """The bytes of all V tokens."""
        found = self.tokenizer.all_bytes()[: self.vocab_size]
        return found + [b""] * (self.vocab_size - len(found))

    def in_precision(self, dtype: str) -> "LoadedModel":
        """The same model with activations, products and matrices of this dtype.

        Matrices are cast here, once; every pass would cast them otherwise, with the
        same result. Vectors, such as the scales of norms, keep their precision.
        """
        config = self.functions.config
        trunk = dataclasses.replace(config.trunk, dtype=dtype)
        config = dataclasses.replace(config, trunk=trunk)
        on_cpu = dtype == "bfloat16" and jax.default_backend() == "cpu"
        # Where XLA reads the cache on a CPU, it would convert all of it in every pass.
        kernel = attention_kernel.reads_heads_of(trunk.head_width)
        cache_dtype = BITS.__name__ if kernel else "float32"
        return dataclasses.replace(
            self,
            functions=ModelFunctions(config, cache_dtype if on_cpu else None),
            params=cast_matrices(self.params, dtype),
        )

    def for_decoding(self) -> "LoadedModel":
        """The same model with parameters as this device reads them fastest."""
        return dataclasses.replace(
            self,
            params={**self.params, "trunk": decoding_layout(self.params["trunk"])},
            trunk_identity=self.fingerprint,
        )

    def held_out(self, count: int, length: int) -> list[np.ndarray]:
        """Held-out prompts: `count` beginnings of documents of `length` tokens each.

        Of a model that was trained on examples, they are inputs of at most that length.

        Raises:
          UserError: the model is a pretrained one, of whose text nothing is known.
        """
        if self.task is None:
            raise UserError(
                f"{self.name} is a pretrained model without held-out text of its own: "
                "give --prompts_file."
            )
        prompts = held_out_prompts(self.task, count, length, tokenizer=self.tokenizer)
        return [prompt.tokens for prompt in prompts]

    def encode_prompt(self, prompt: str | Sequence[Message]) -> np.ndarray:
        """Ids of a prompt, int32.

        Args:
          prompt: a text: what a user says to a model that converses, else the
            beginning of a document; or a conversation, each message with `role` and
            `content`.

        Raises:
          UserError: a conversation, and the model does not converse.
        """
        if self.chat is not None:
            messages = (
                [{"role": "user", "content": prompt}]
                if isinstance(prompt, str)
                else prompt
            )
            ids = self.tokenizer.encode_chat(self.chat.render(messages))
        elif isinstance(prompt, str):
            begin = [] if self.begin_of_text is None else [self.begin_of_text]
            ids = [*begin, *self.tokenizer.encode(prompt)]
        else:
            raise UserError(
                f"{self.name} has no chat template: give a text, not a conversation."
            )
        return np.asarray(ids, np.int32)

    def without_chat(self) -> "LoadedModel":
        """The same model, continuing texts as they are."""
        return dataclasses.replace(self, chat=None)


def load_model(
    name: str, heads: str | None = None, weights: str | None = None
) -> LoadedModel:
    """Loads a model.

    Args:
      name: a run folder, one of its checkpoint folders (`RUN/checkpoints/STEP`), a
        pretrained checkpoint (a Hugging Face folder or a GGUF file), or a known name:
        `demo`, `smollm2`.
      heads: folder of block heads for a pretrained checkpoint; None for those that
        come with it or lie in `runs/NAME/heads`, if any.
      weights: folder that holds the file of a known pretrained model in parts (see
        `pretrained.file_parts`), for hosts without the package that brings it.

    Raises:
      UserError: there is no model, it is damaged, or the heads are not its own.
    """
    if weights is not None:
        from bpd_jax.pretrained.file_parts import joined_file

        if name not in PACKAGED:
            raise UserError(
                f"--weights is for {', '.join(PACKAGED)}; {name} has files of its own."
            )
        with joined_file(weights) as file:
            return _load_pretrained(name, file, heads)
    if name in PACKAGED:
        return _load_pretrained(name, find_packaged(name), heads)
    path = as_path(KNOWN_RUNS.get(name, name))
    if path.is_file() or (path / "config.json").is_file():
        return _load_pretrained(path.stem if path.is_file() else path.name, path, heads)
    if not path.is_dir():
        known = ", ".join([*KNOWN_RUNS, *PACKAGED])
        hint = " (make train-demo trains it)" if name in KNOWN_RUNS else ""
        raise UserError(
            f"there is no model {name!r}: {path} is not a file or folder{hint}; give "
            "a run folder, one of its checkpoints, a Hugging Face folder, a GGUF file, "
            f"or a known name ({known})."
        )
    if heads is not None:
        raise UserError(
            f"--heads is for pretrained models; {path} was trained with its own."
        )
    return _load_run(path)


def _load_run(folder: pathlib.Path) -> LoadedModel:
    # Late, like the formats below: a model is loaded by the modules of its kind alone.
    from bpd_jax.training.exported_params import load_run_parameters, selected_step

    step = None
    if folder.parent.name == "checkpoints" and folder.name.isdigit():
        step = int(folder.name)
        folder = folder.parent.parent
    else:
        step = selected_step(folder)
    config = load_config(folder / "model.json")
    tokenizer = Tokenizer.load(folder)
    return LoadedModel(
        name=folder.name,
        folder=folder,
        functions=ModelFunctions(config),
        params=load_run_parameters(folder, config, step),
        tokenizer=tokenizer,
        end_tokens=(tokenizer.end_of_text,),
        task=load_task(folder / "task.json"),
        begin_of_text=tokenizer.end_of_text,
        shelves=(folder,),
    )


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Opens a pretrained checkpoint: a Hugging Face folder or a GGUF file."""
    # Late, so that models of our own load where these formats' packages are missing.
    if path.is_dir():
        from bpd_jax.pretrained.huggingface import open_folder

        return open_folder(path)
    from bpd_jax.pretrained.gguf_model import open_gguf

    return open_gguf(path)


def _load_pretrained(name: str, path: pathlib.Path, heads: str | None) -> LoadedModel:
    from bpd_jax.pretrained.load_parameters import load_trunk

    found = open_checkpoint(path)
    tokens = found.tokenizer.get_vocab_size(with_added_tokens=False)
    if tokens > found.config.vocab_size:
        raise UserError(
            f"the tokenizer of {path} has {tokens} tokens and the model "
            f"{found.config.vocab_size}: they are not of one model."
        )
    params = load_trunk(found.config, found.layout, found.tensors)
    config = BlockwiseConfig(found.config)
    folder = RUNS / name
    # What the user made comes before what is shipped.
    shelves = (folder, SHIPPED / name) if name in PACKAGED else (folder,)
    loaded = LoadedModel(
        name=name,
        folder=folder,
        functions=ModelFunctions(config),
        params=params,
        tokenizer=Tokenizer(found.tokenizer, str(path), found.end_tokens[0]),
        end_tokens=found.end_tokens,
        begin_of_text=found.begin_of_text,
        chat=Chat.of(found),
        shelves=shelves,
    )
    place = heads or loaded.own(HEADS)
    if place is None:
        return loaded
    trained = load_heads(place)
    config, params = attach_heads(config, params, trained, name=name)
    return dataclasses.replace(
        loaded,
        functions=ModelFunctions(config),
        params=params,
        accuracies=_accuracies(trained),
        heads_identity=trained.identity,
    )


def _accuracies(heads: LoadedHeads) -> tuple[tuple[float, ...], ...] | None:
    """How often the candidates of each head were right when it was trained."""
    found = heads.facts.get("accuracies")
    if found is None:
        return None
    try:
        return tuple(tuple(float(chance) for chance in head) for head in found)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{heads.folder / HEADER} does not hold accuracies of heads ({error}): "
            "train the heads again, or get the folder again."
        ) from error


def load_task(path: str | os.PathLike[str]) -> DataTask:
    """Reads the task that a run folder keeps as JSON."""
    try:
        fields = files.read_json(path)
        return task_from_json(fields)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} does not describe a task: {error}.") from error
