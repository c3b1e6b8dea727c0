"""Loading of run folders, and of their held-out prompts.

These are the inputs of examples, or windows of documents.
"""

import heapq
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from bpd_jax.base import reading
from bpd_jax.base.errors import UserError
from bpd_jax.data.corpora import Document, fraction_of, split_documents
from bpd_jax.data.example_readers import read_examples
from bpd_jax.data.example_task import SEPARATOR, DataTask, ExampleTask, task_from_json
from bpd_jax.data.text_task import TextTask
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.loaded_model import LanguageModel, SizesCheck
from bpd_jax.models.config_files import load_config
from bpd_jax.models.model import Model
from bpd_jax.storage import files
from bpd_jax.training.exported_params import load_run_parameters, selected_step
from bpd_jax.training.run_names import CHECKPOINTS, whole_steps

# Number of texts tokenized at once.
_BATCH = 256


def load_run(
    folder: pathlib.Path, mesh: Mesh | None, check: SizesCheck | None = None
) -> LanguageModel:
    """Loads the model of a run folder, or of one of its checkpoints.

    `check` is called as `load_model` says.
    """
    if folder.parent.name == "checkpoints" and folder.name.isdigit():
        step: int | None = int(folder.name)
        folder = folder.parent.parent
    else:
        step = selected_step(folder)
    config = load_config(folder / "model.json")
    if check is not None:
        check(config.trunk)
    tokenizer = Tokenizer.load(folder)
    return LanguageModel(
        name=folder.name,
        folder=folder,
        model=Model(config, load_run_parameters(folder, config, step, mesh), mesh=mesh),
        tokenizer=tokenizer,
        end_tokens=(tokenizer.end_of_text,),
        task=load_task(folder / "task.json"),
        begin_of_text=tokenizer.end_of_text,
        asset_folders=(folder,),
        step=step or max(whole_steps(folder / CHECKPOINTS), default=None),
    )


def load_task(path: str | os.PathLike[str]) -> DataTask:
    """Reads the task of a run folder from its JSON file."""
    try:
        return task_from_json(files.read_json(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: is this a run folder?") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} does not describe a task: {error}.") from error


def held_out(loaded: LanguageModel, count: int, length: int) -> list[np.ndarray]:
    """Held-out prompts: the first `length` tokens of `count` documents.

    For a model that was trained on examples, inputs of at most `length` tokens.
    """
    if loaded.task is None:
        raise UserError(
            f"{loaded.name} is a pretrained model without held-out text: give "
            "--prompts_file."
        )
    prompts = held_out_prompts(loaded.task, count, length, loaded.tokenizer)
    return [prompt.tokens for prompt in prompts]


class Prompt(NamedTuple):
    """A piece of a document, or the inputs of an example.

    Attributes:
      document: id of the document or example.
      tokens: `[n]` int32; the first window of a document, and the inputs of an example,
        begin with the end-of-text token.
    """

    document: str
    tokens: np.ndarray


def held_out_prompts(
    task: DataTask, num: int, prompt_tokens: int, tokenizer: Tokenizer
) -> list[Prompt]:
    """Returns `num` prompts from the validation split.

    For documents, the end-of-text token and the tokens of each document are split into
    consecutive windows of `prompt_tokens`; a shorter last window is discarded. The
    first windows of all documents come first, then all second windows, and so on, so
    that the prompts come from as many documents as possible. If the split does not fit
    into memory, only the first documents in this order are used.

    For examples, a prompt consists of the end-of-text token, the inputs of an example
    and the separator, as in training; inputs that do not fit into `prompt_tokens` are
    truncated at the end.
    """
    if num < 1 or prompt_tokens < 1:
        raise UserError(
            f"cannot make {num} prompts of {prompt_tokens} tokens: both numbers must "
            "be 1 or more."
        )
    texts = _first_texts(
        split_documents(task, "validation")
        if isinstance(task, TextTask)
        else (
            Document(id, targets if inputs is None else inputs)
            for id, inputs, targets in read_examples(task, "validation")
        )
    )
    if isinstance(task, ExampleTask) and task.has_inputs:
        separator = tokenizer.encode(SEPARATOR)
        if (length := prompt_tokens - len(separator)) < 1:
            raise UserError(
                f"a prompt of {prompt_tokens} tokens has no room for inputs: request "
                "longer prompts."
            )
        prompts = [
            Prompt(text.id, np.array([*ids[:length], *separator], np.int32))
            for text, ids in _encoded(texts[:num], tokenizer)
        ]
    else:
        prompts = _windows(texts, num, prompt_tokens, tokenizer)
    if len(prompts) < num:
        raise UserError(
            f"the {len(texts)} validation documents of {task.name} yield only "
            f"{len(prompts)} of {num} prompts of {prompt_tokens} tokens: request fewer "
            "or shorter prompts, or raise validation_fraction."
        )
    return prompts


def _first_texts(texts: Iterable[Document]) -> list[Document]:
    """The first texts in the order of a hash, up to `reading.MOST_KEPT` bytes."""
    heap: list[tuple[float, Document]] = []
    total = 0
    for text in texts:
        heapq.heappush(heap, (-fraction_of("p0", text.id), text))
        total += len(text.text) + reading.LINE_COST
        while total > reading.MOST_KEPT:
            total -= len(heapq.heappop(heap)[1].text) + reading.LINE_COST
    return [text for _, text in sorted(heap, key=lambda item: (-item[0], item[1]))]


def _encoded(
    texts: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[Document, list[int]]]:
    """Yields every text with the end-of-text token and its tokens."""
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, _BATCH)):
        for text, ids in zip(
            batch, tokenizer.encode_batch([text.text for text in batch]), strict=True
        ):
            yield text, [tokenizer.end_of_text, *ids]


def _windows(
    texts: Sequence[Document], num: int, prompt_tokens: int, tokenizer: Tokenizer
) -> list[Prompt]:
    """The first `num` windows, or all if there are fewer."""
    # (index of the window in its document, index of the document, prompt)
    windows: list[tuple[int, int, Prompt]] = []
    documents = 0
    for document, (text, ids) in enumerate(_encoded(texts, tokenizer)):
        tokens = np.array(ids, np.int32)
        for index in range(len(tokens) // prompt_tokens):
            window = tokens[index * prompt_tokens : (index + 1) * prompt_tokens]
            windows.append((index, document, Prompt(text.id, window)))
        documents += len(tokens) >= prompt_tokens
        if documents == num:  # The first windows of documents precede all others.
            break
    windows.sort(key=lambda window: window[:2])
    return [prompt for _, _, prompt in windows[:num]]
