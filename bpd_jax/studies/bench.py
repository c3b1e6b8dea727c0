"""The model of a study with its examples, the texts it decodes, and their replay.

Texts are decoded greedily once per task and kept with what the model said along them
(`WORKDIR/texts/TASK.npz`); studies of the same model, tasks and lengths share them.
"""

import functools
import hashlib
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bpd_jax import files
from bpd_jax.data.prompts import read_prompts_file
from bpd_jax.data.row_sources import WHOLE, Shard
from bpd_jax.decoding.asset_files import load_assets
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loading import LoadedModel, load_model
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.recording import RecordedText, padded_sizes, record_text
from bpd_jax.errors import UserError
from bpd_jax.models.heads_files import fingerprint
from bpd_jax.studies import tasks
from bpd_jax.studies.config import TASK_FIELD, StudyConfig, parse_contender
from bpd_jax.studies.records import REPORT, TUNE
from bpd_jax.studies.tasks import StudyExample

_FIELDS = ("candidates", "log_probs", "entropies", "hidden")


class Bench:
    """Model, examples and texts of one study; everything is made when it is asked."""

    def __init__(
        self, config: StudyConfig, workdir: pathlib.Path, shard: Shard = WHOLE
    ) -> None:
        """Loads nothing yet.

        Args:
          config: of the study.
          workdir: where texts are kept.
          shard: part of the examples that is this program's.
        """
        self.config, self.workdir, self.shard = config, workdir, shard
        self._examples: dict[str, list[StudyExample]] = {}
        self._texts: dict[str, list[RecordedText]] = {}
        self._decoders: dict[tuple[str, str | None], Decoder] = {}
        self._models: dict[str, LoadedModel] = {}

    def model_name(self, task: str) -> str:
        """The model that decodes a task."""
        return self.config.model.replace(TASK_FIELD, task)

    def loaded(self, task: str) -> LoadedModel:
        """The model of a task; of all tasks, where they share one."""
        name = self.model_name(task)
        if name not in self._models:
            self._models[name] = load_model(name)
        return self._models[name]

    def options(self, task: str) -> DecodeOptions:
        """Greedy decoding of a task."""
        return DecodeOptions(
            max_new_tokens=self.config.max_new_tokens,
            end_of_text=self.loaded(task).end_of_text,
            batch_size=self.config.batch_size,
        )

    @functools.cached_property
    def _trained(self) -> str:
        """All prompts that heads were trained on."""
        path = self.config.trained_prompts
        return "" if path is None else "\n".join(read_prompts_file(path))

    def sources(self, task: str) -> list[tasks.Source]:
        """All records of a task that heads were not trained on."""
        if self.config.data is None:
            raise UserError(f"the task {task} needs --data: a folder of JSON Lines.")
        return [
            source
            for source in tasks.read_sources(pathlib.Path(self.config.data), task)
            if source.beginning not in self._trained or not self._trained
        ]

    def examples(self, task: str) -> list[StudyExample]:
        """The examples of a task: always the same ones."""
        if task not in self._examples:
            index, count = self.shard.index, self.shard.count
            self._examples[task] = self._draw(task)[index::count]
        return self._examples[task]

    def _draw(self, task: str) -> list[StudyExample]:
        config, loaded = self.config, self.loaded(task)
        longest = config.longest_prompt
        if task != tasks.HELD_OUT:
            return tasks.draw_examples(
                self.sources(task),
                loaded,
                examples=config.examples,
                tune=config.tune,
                longest=longest,
                longest_whole=config.longest_whole,
            )
        prompts = loaded.held_out(config.tune + config.examples, longest)
        return [
            StudyExample(
                index,
                TUNE if index < config.tune else REPORT,
                loaded.tokenizer.decode(prompt),
                prompt,
                (),
            )
            for index, prompt in enumerate(prompts)
        ]

    def contender(self, name: str, task: str) -> tuple[Decoder, Method]:
        """The decoder that has a contender's models, and the contender's method."""
        found = parse_contender(name)
        given: dict[str, str | None] = {}
        if found.assets is not None:
            for kind, folder in self.config.assets[found.assets].items():
                given[kind] = folder.replace(TASK_FIELD, task)
        key = (self.model_name(task), json.dumps(given, sort_keys=True))
        if key not in self._decoders:
            loaded = self.loaded(task)
            self._decoders[key] = Decoder(
                loaded.functions,
                loaded.params,
                width=self.config.lattice_width,
                assets=load_assets(loaded, given),
                token_bytes=loaded.token_bytes,
            )
        return self._decoders[key], found.method

    def depends_on_task(self, name: str) -> bool:
        """Whether a contender's models differ from task to task."""
        assets = self.config.assets.get(parse_contender(name).assets or "", {})
        return TASK_FIELD in "".join([self.config.model, *assets.values()])

    def label(self, name: str) -> str:
        """What people read in place of a contender's name."""
        if name in self.config.labels:
            return self.config.labels[name]
        decoder, method = self.contender(name, self.config.tasks[0])
        label = decoder.label(method)
        assets = parse_contender(name).assets
        return label if assets is None else f"{label}, {assets.replace('_', ' ')}"

    def texts(
        self, task: str, advance: Callable[[int], object] = lambda tokens: None
    ) -> list[RecordedText]:
        """What the model decodes of each example, with what it says along it.

        Args:
          task: its name.
          advance: called with a number of tokens that were decoded or recorded.
        """
        if task not in self._texts:
            path = self.workdir / "texts" / f"{task}{self.shard_suffix}.npz"
            digest = self._digest(task)
            found = _load(path, digest)
            if found is None:
                found = self._decode(task, advance)
                _save(path, digest, found)
            self._texts[task] = found
        return self._texts[task]

    @property
    def shard_suffix(self) -> str:
        """Tells the files of one shard from those of others."""
        if self.shard == WHOLE:
            return ""
        return f"-{self.shard.index}-of-{self.shard.count}"

    def _digest(self, task: str) -> str:
        """What the texts depend on."""
        loaded, config = self.loaded(task), self.config
        facts: list[Any] = [
            fingerprint(loaded.functions.config, loaded.params),
            loaded.heads_identity,
            config.max_new_tokens,
            config.lattice_width,
            loaded.end_of_text,
            [example.input_ids.tolist() for example in self.examples(task)],
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _decode(
        self, task: str, advance: Callable[[int], object]
    ) -> list[RecordedText]:
        decoder, _ = self.contender("greedy", task)
        options, examples = self.options(task), self.examples(task)
        # The longest first, so that what is compiled for them fits the others.
        order = sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids))
        prompts = [examples[index].input_ids for index in order]
        decoded = decoder.decode(GREEDY, prompts, options, on_progress=advance)
        slots, positions = padded_sizes(decoded)
        width = min(decoder.width, decoder.model.config.draft_vocab_size)
        found: dict[int, RecordedText] = {}
        for index, text in zip(order, decoded, strict=True):
            found[index] = record_text(
                decoder, text, width, slots=slots, positions=positions
            )
            advance(len(text.output_ids))
        return [found[index] for index in range(len(examples))]


def _save(path: pathlib.Path, digest: str, texts: Sequence[RecordedText]) -> None:
    arrays: dict[str, Any] = {}
    for name in ("input_ids", "output_ids", *_FIELDS):
        parts = [getattr(text, name) for text in texts]
        arrays[name] = np.concatenate(parts)
        arrays[f"{name}_lengths"] = np.array([len(part) for part in parts])
    with files.replacing_file(path) as temporary, temporary.open("wb") as stream:
        np.savez(stream, digest=digest, **arrays)


def _load(path: str | os.PathLike[str], digest: str) -> list[RecordedText] | None:
    """The texts, or None if there are none that are up to date."""
    try:
        with np.load(path) as arrays:
            if str(arrays["digest"]) != digest:
                return None
            columns = [
                np.split(arrays[name], np.cumsum(arrays[f"{name}_lengths"])[:-1])
                for name in ("input_ids", "output_ids", *_FIELDS)
            ]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path} ({error}): remove it.") from error
    return [RecordedText(*fields) for fields in zip(*columns, strict=True)]
