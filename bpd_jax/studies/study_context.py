"""The context of all measurements of a study: model, examples and decoded texts.

Texts are decoded once per task, greedily unless `text_temperature` is above 0, and
stored with the model's predictions along them (`WORKDIR/texts/TASK-DIGEST.npz`).
Studies with the same model, tasks, lengths and temperature share them.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.data.row_sources import WHOLE, Shard
from bpd_jax.data.text_readers import read_prompts_file
from bpd_jax.decoding.asset_files import ASSET_FOLDERS, with_assets
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.recording import RecordedText, padded_sizes, record_text
from bpd_jax.decoding.run_loading import held_out
from bpd_jax.models.mesh import decoding_mesh
from bpd_jax.storage.paths import as_path
from bpd_jax.studies import tasks
from bpd_jax.studies.conversations import later_turns
from bpd_jax.studies.study_config import (
    TASK_FIELD,
    StudyConfig,
    class_of,
    parse_contender,
)
from bpd_jax.studies.study_records import REPORT, TUNE
from bpd_jax.studies.tasks import StudyExample, plain_text
from bpd_jax.studies.text_files import content_digest, load_texts, save_texts
from bpd_jax.training import hosts


def exact_number(value: float) -> float:
    """A number of a grid, an integer if it is whole.

    >>> exact_number(3.0), exact_number(0.5)
    (3, 0.5)
    """
    return int(value) if float(value).is_integer() else value


# Maximum number of texts in a file.
_TEXTS_PER_FILE = 128


class StudyContext:
    """The model, examples and texts of one study, each created at its first use.

    Attributes:
      config, workdir, shard: the arguments of the constructor.
      alphas: class of rescorers → task → tuned weight; see `bpd_jax.studies.tuning`.
        Contenders of other classes have α = 1.
      zero_wins: class of rescorers → tasks on which α = 0 is better than that weight.
      tuned: contender → task → its tuned settings, with `StudyConfig.grids`.
    """

    def __init__(
        self, config: StudyConfig, workdir: pathlib.Path, shard: Shard = WHOLE
    ) -> None:
        """Stores the arguments; loads nothing.

        Args:
          config: settings of the study.
          workdir: folder of the texts.
          shard: the part of the examples that this program measures.
        """
        if config.text_temperature and shard != WHOLE:
            raise UserError(
                "text_temperature and --shard are both given: a sampled text depends "
                "on those beside it; leave --shard out."
            )
        self.config, self.workdir, self.shard = config, workdir, shard
        self._examples: dict[str, list[StudyExample]] = {}
        self._texts: dict[str, list[RecordedText]] = {}
        self._decoders: dict[tuple[str, str | None], Decoder] = {}
        self._models: dict[str, LanguageModel] = {}
        self._made_with: dict[tuple[str | None, tuple[str, ...]], str] = {}
        self.alphas: dict[str, dict[str, float]] = {}
        self.zero_wins: dict[str, list[str]] = {}
        self.tuned: dict[str, dict[str, dict[str, float]]] = {}

    def model_name(self, task: str) -> str:
        """The name of the model that decodes a task."""
        return self.config.model.replace(TASK_FIELD, task)

    def loaded(self, task: str) -> LanguageModel:
        """The model of a task, with parameters in the layout of `api.load`."""
        name = self.model_name(task)
        if name not in self._models:
            # Several large models may not fit into memory, so only one is kept.
            self._models, self._decoders = {}, {}
            mesh = decoding_mesh(self.config.mesh)
            self._models[name] = load_model(name, mesh=mesh).for_decoding()
        return self._models[name]

    def options(self, task: str) -> DecodeOptions:
        """The options of greedy decoding for a task; those of replay, too."""
        return DecodeOptions(
            max_new_tokens=self.config.new_tokens(task),
            end_of_text=self.loaded(task).end_of_text,
            batch_size=self.config.batch_size,
        )

    def text_options(
        self, task: str, examples: Sequence[StudyExample]
    ) -> DecodeOptions:
        """The options of the texts of one file, which has random numbers of its own."""
        name = f"{task} {examples[0].index}"
        return dataclasses.replace(
            self.options(task),
            temperature=self.config.text_temperature,
            draft_noise=self.config.draft_noise,
            seed=zlib.crc32(name.encode()),
        )

    @functools.cached_property
    def _trained(self) -> str:
        """The text of all prompts that heads were trained on."""
        path = self.config.trained_prompts
        return "" if path is None else "\n".join(read_prompts_file(path))

    def sources(self, task: str) -> list[tasks.TaskRecord]:
        """All records of a task that heads were not trained on."""
        if self.config.data is None:
            raise UserError(f"the task {task} needs --data, the folder of the tasks.")
        return [
            source
            for source in tasks.read_sources(as_path(self.config.data), task)
            if not self._trained or source.beginning not in self._trained
        ]

    def examples(self, task: str) -> list[StudyExample]:
        """The examples of a task: always the same ones."""
        return self.whole_draw(task)[self.shard.index :: self.shard.count]

    def whole_draw(self, task: str) -> list[StudyExample]:
        """The examples of all shards."""
        if task not in self._examples:
            examples = self._draw(task)
            if not any(example.part == REPORT for example in examples):
                raise UserError(
                    f"{task} has no example to report on: {len(examples)} records are "
                    f"suitable, and {self.config.tune} of them are used for tuning."
                )
            self._examples[task] = examples
        return self._examples[task]

    def _draw(self, task: str) -> list[StudyExample]:
        config, loaded = self.config, self.loaded(task)
        # A block may begin at the last token that is decoded.
        model = loaded.config
        room = model.trunk.max_length - model.block_size
        room -= config.new_tokens(task)
        longest = min(config.longest_prompt, room)
        if longest < 1:
            raise UserError(
                f"the model of {task} has no positions left for a prompt in addition "
                f"to {config.new_tokens(task)} decoded tokens: decode fewer tokens."
            )
        if task != tasks.HELD_OUT:
            longest_whole = min(config.longest_whole, room)
            first_turns = tasks.draw_examples(
                self.sources(task),
                loaded,
                examples=config.examples,
                tune=config.tune,
                longest=longest,
                longest_whole=longest_whole,
            )
            return first_turns + later_turns(
                first_turns,
                functools.partial(self._answers, task),
                loaded,
                turns=config.turns,
                longest=longest_whole,
            )
        prompts = held_out(loaded, config.tune + config.examples, longest)
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

    def _answers(self, task: str, prompts: list[np.ndarray]) -> list[str]:
        """The model's greedy answers to prompts."""
        decoder, _ = self.contender(GREEDY.name, task)
        loaded = self.loaded(task)
        return [
            plain_text(loaded, output.output_ids)
            for output in decoder.decode(GREEDY, prompts, self.options(task))
        ]

    def contender(self, name: str, task: str) -> tuple[Decoder, Method]:
        """Returns a decoder with a contender's models, and the contender's method."""
        parsed = parse_contender(name)
        folders: dict[str, str | None] = {}
        if parsed.assets is not None:
            for kind, folder in self.config.assets[parsed.assets].items():
                folders[kind] = folder.replace(TASK_FIELD, task)
        key = (self.model_name(task), json.dumps(folders, sort_keys=True))
        if key not in self._decoders:
            loaded = self.loaded(task)
            self._decoders[key] = with_assets(loaded, folders).decoder(
                lattice_width=self.config.lattice_width
            )
        method = parsed.method
        for setting, value in self._tuned(name).get(task, {}).items():
            method = method.with_setting(setting, exact_number(value))
        return self._decoders[key], method.with_source(self.config.source)

    def unavailable(self, names: Sequence[str]) -> dict[str, str]:
        """The contenders that cannot draft for every task, each with the reason."""
        reasons: dict[str, str] = {}
        # Task by task, because only one model is kept.
        for task in self.config.tasks:
            for name in names:
                first = task == self.config.tasks[0]
                if name in reasons or not (first or self.depends_on_task(name)):
                    continue
                try:
                    decoder, method = self.contender(name, task)
                    decoder.drafter(method)
                except UserError as error:
                    reasons[name] = str(error)
        return reasons

    def _tuned(self, name: str) -> dict[str, dict[str, float]]:
        """Tuned settings of a contender by task; empty if it sets α itself."""
        if name in self.tuned:
            return self.tuned[name]
        method = parse_contender(name).method
        if method.setting("alpha") is not None:
            return {}
        alphas = self.alphas.get(class_of(method) or "", {})
        return {task: {"alpha": alpha} for task, alpha in alphas.items()}

    def made_with(self, name: str) -> str:
        """A digest of the files of a contender's models, and of its tuned weights."""
        parsed = parse_contender(name)
        needs = parsed.method.with_source(self.config.source).needs
        kinds = tuple(kind for kind in ASSET_FOLDERS if kind in needs)
        key = (parsed.assets, kinds)
        if key not in self._made_with:
            folders = self.config.assets.get(parsed.assets or "", {})
            digest = hashlib.sha256()
            for task in self.config.tasks if self._models_differ(name) else [""]:
                for kind in kinds:
                    path: pathlib.Path | None
                    if folder := folders.get(kind):
                        path = as_path(folder.replace(TASK_FIELD, task))
                    else:
                        loaded = self.loaded(task or self.config.tasks[0])
                        path = loaded.find_asset(ASSET_FOLDERS[kind])
                    if path is not None:
                        line = f"{task} {kind} {content_digest(path)}\n"
                        digest.update(line.encode())
            self._made_with[key] = digest.hexdigest()
        tuned = self._tuned(name)
        if not tuned:
            return self._made_with[key]
        chosen: dict[str, Any] = {task: tuned[task] for task in self.config.tasks}
        if name not in self.tuned:  # The form of the weights of a class.
            chosen = {task: values["alpha"] for task, values in chosen.items()}
        text = f"{self._made_with[key]} {json.dumps(chosen, sort_keys=True)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def depends_on_task(self, name: str) -> bool:
        """Whether a contender's models or weight depend on the task."""
        tuned = self._tuned(name)
        chosen = [tuned[task] for task in self.config.tasks if task in tuned]
        if any(values != chosen[0] for values in chosen):
            return True
        return self._models_differ(name)

    def _models_differ(self, name: str) -> bool:
        assets = self.config.assets.get(parse_contender(name).assets or "", {})
        return TASK_FIELD in "".join([self.config.model, *assets.values()])

    def label(self, name: str) -> str:
        """The display name of a contender."""
        if name in self.config.labels:
            return self.config.labels[name]
        decoder, _ = self.contender(name, self.config.tasks[0])
        # Without the tuned settings, which depend on the task.
        contender = parse_contender(name)
        method = contender.method.with_source(self.config.source)
        label, assets = decoder.label(method), contender.assets
        return label if assets is None else f"{label}, {assets.replace('_', ' ')}"

    def texts(self, task: str) -> list[RecordedText]:
        """The decoded text of each example, with the model's predictions along it.

        Decodes missing texts, with a progress bar, and stores them.
        """
        if task not in self._texts:
            all_texts: list[RecordedText] = []
            whole = self.examples(task)
            for part, start in enumerate(range(0, len(whole), _TEXTS_PER_FILE)):
                examples = whole[start : start + _TEXTS_PER_FILE]
                digest = self.digest(task, examples)
                name = f"{task}{self.shard_suffix}{f'-part-{part}' * (part > 0)}"
                # Texts of other studies, such as those of another source, are kept.
                path = self.workdir / "texts" / f"{name}-{digest[:12]}.npz"
                texts = load_texts(path, digest)
                if hosts.agree(texts is None):
                    texts = self._decode(task, examples)
                    hosts.first(functools.partial(save_texts, path, digest, texts))
                elif texts is None:
                    raise UserError(
                        f"{path} is missing here: all processes must share the folder."
                    )
                all_texts += texts
            self._texts[task] = all_texts
        return self._texts[task]

    @property
    def shard_suffix(self) -> str:
        """Suffix of the names of this shard's files; empty if there is one shard."""
        if self.shard == WHOLE:
            return ""
        return f"-{self.shard.index}-of-{self.shard.count}"

    def digest(self, task: str, examples: Sequence[StudyExample]) -> str:
        """A digest of everything that texts depend on, such as model and prompts."""
        loaded, config = self.loaded(task), self.config
        facts: list[Any] = [
            loaded.fingerprint,
            loaded.heads_identity,
            config.new_tokens(task),
            config.lattice_width,
            loaded.end_of_text,
            [example.input_ids.tolist() for example in examples],
        ]
        if loaded.config.draft_vocab_size < loaded.vocab_size:
            # Earlier texts have the entropy of head 1 over the whole vocabulary.
            facts.append("entropies over the draft vocabulary")
        if config.text_temperature:
            facts.append(f"sampled at {config.text_temperature:g}")
        if config.draft_noise:
            facts.append(f"drafted with noise {config.draft_noise:g}")
        drafter = loaded.find_asset(ASSET_FOLDERS["drafter"])
        if config.source == "block" and drafter is not None:
            facts.append(content_digest(drafter))
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _decode(
        self, task: str, examples: Sequence[StudyExample]
    ) -> list[RecordedText]:
        """Decodes examples, then records the model's predictions along the texts."""
        decoder, _ = self.contender(GREEDY.name, task)
        # The longest first, so that programs compiled for them are reused.
        order = sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids))
        prompts = [examples[index].input_ids for index in order]
        total = 2 * len(examples) * self.config.new_tokens(task)
        with progress.bar(label="decoding", total=total, unit=" tokens") as bar:
            bar.set_postfix_str(task, refresh=False)
            options = self.text_options(task, examples)
            decoded = decoder.decode(GREEDY, prompts, options, on_progress=bar.update)
            slots, positions = padded_sizes(decoded)
            width = min(decoder.width, decoder.model.config.draft_vocab_size)
            recorded: dict[int, RecordedText] = {}
            for row, (index, text) in enumerate(zip(order, decoded, strict=True)):
                recorded[index] = record_text(
                    decoder,
                    text,
                    width,
                    slots=slots,
                    positions=positions,
                    sampled=(options, row),
                )
                bar.update(len(text.output_ids))
        return [recorded[index] for index in range(len(examples))]
