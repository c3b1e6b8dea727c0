"""The settings of a study: model, tasks, contenders, numbers of examples."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from bpd_jax.decoding.asset_files import ASSET_FOLDERS
from bpd_jax.decoding.methods import Method, parse_method
from bpd_jax.decoding.options import DecodeConfig
from bpd_jax.errors import UserError
from bpd_jax.settings import (
    TEXT,
    Count,
    Natural,
    Validated,
    choice,
    each,
    number,
)
from bpd_jax.studies.printed import ALPHAS

BPD = "bpd"

# Settings that may change while earlier records of a study stay valid; digests of their
# contents identify data and models (`StudyContext.digest`, `.made_with`) ...
_OPEN = (
    "assets",
    "batch_size",
    "contenders",
    "data",
    "labels",
    "notes",
    "printed",
    "rounds",
    "shown",
    "speculative",
    "study",
    # `StudyContext.made_with` covers the α of contenders.
    "alphas",
    "tuners",
)
# ... and the settings that determine the drafts along a text.
_DECISIVE = (
    "model",
    "examples",
    "tune",
    "max_new_tokens",
    "decode_lengths",
    "longest_prompt",
    "longest_whole",
    "lattice_width",
    "trained_prompts",
    "turns",
    "source",
)
# Settings that are missing in headers of earlier versions, with their values there.
_ADDED: dict[str, Any] = {"decode_lengths": {}, "source": "heads", "turns": 1}
TASK_FIELD = "{task}"

Names = Annotated[Sequence[str], each(TEXT, distinct=True)]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A method with the models it drafts with.

    Attributes:
      name: `METHOD`, or `METHOD@SET` where SET names models of
        `StudyConfig.assets`.
      method: the method.
      assets: SET; None for the models of the run folder.
    """

    name: str
    method: Method
    assets: str | None = None


def parse_contender(name: str) -> Contender:
    """Reads a contender's name.

    >>> parse_contender("ngram:16@general_4").assets
    'general_4'

    Raises:
      UserError: there is no such method.
    """
    method, at, assets = name.partition("@")
    return Contender(name, parse_method(method), assets if at else None)


CLASSES = ("ngram", "neural")
"""Classes of rescorers that share a weight α."""


def class_of(method: Method) -> str | None:
    """The class of the rescorer of a method; None for none or several.

    >>> class_of(parse_contender("medusa_ngram:8").method)
    'ngram'
    """
    classes = [name for name in CLASSES if name in method.kind]
    return classes[0] if len(classes) == 1 else None


@dataclasses.dataclass(frozen=True)
class StudyConfig(Validated):
    """One study at one size.

    Attributes:
      study: its name, see `bpd_jax.studies.study_catalog`.
      size: name of the size, as the gin file gives it.
      model: run folder, checkpoint or known name; `{task}` in it stands for the task,
        where every task has a finetuned model.
      data: folder of the tasks: JSON Lines, `NAME/SPLIT.jsonl.gz`, or what TensorFlow
        Datasets has prepared; None for the model's own held-out text alone.
      tasks: names; see `bpd_jax.studies.tasks`.
      contenders: methods to replay, each with `@SET` where it needs other models than
        the model's own.
      source: source of the contenders that are named after the paper's methods, such as
        `bpd` and `ngram:16`: the model's block `heads`, or its `block` drafter. "BPD"
        then stands for the unrefined draft of that source.
      assets: sets of models: SET → kind (`ngram`, `rescorer`, …) → folder. `{task}` in
        a folder stands for the task.
      labels: display names of contenders that replace the methods' labels.
      printed: contender → column of the paper's table that it is compared with; see
        `bpd_jax.studies.printed`.
      notes: sentences shown with the results.
      examples, tune: numbers of examples of each task to report on and to tune on;
        the two sets are disjoint.
      turns: of a conversation: 1 for the first one, 2 for both of MT-Bench. A later
        turn is a separate example, whose prompt contains the model's greedy answers
        to the earlier ones.
      max_new_tokens: tokens decoded for each example.
      decode_lengths: by task, in place of `max_new_tokens`.
      longest_prompt: in tokens; longer documents are cut. It is less where the model
        has too few positions for the prompt and what is decoded.
      longest_whole: the same for a prompt without a document; longer prompts are left
        out.
      lattice_width: k of contenders without a k of their own.
      tuners: class of rescorers (`ngram`, `neural`) → the contender on which its weight
        α is tuned, for each task, on the `tune` examples. All contenders of the class
        without an α of their own use the result (paper, appendix E). {} leaves α = 1.
      alphas: the weights to try.
      trained_prompts: file of prompts that block heads were trained on; examples whose
        text begins one of them are left out.
      in_domain: number of texts of each task, neither reported nor tuned on, from which
        in-domain n-gram models are built (Table 7); 0 for no such models.
      shown: number of examples of each task in the draft explorer.
      batch_size: texts decoded together.
      temperatures, rounds: of the studies that measure time.
      speculative: contenders that are timed with speculative sampling too, above
        temperature 0.
    """

    prefix = ""

    study: str
    model: str
    size: str = ""
    data: str | None = None
    tasks: Names = ()
    contenders: Names = ()
    source: Annotated[str, choice("heads", "block")] = "heads"
    assets: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    printed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    examples: Count = 24
    tune: Natural = 12
    turns: Count = 1
    max_new_tokens: Count = 64
    decode_lengths: Mapping[str, Count] = dataclasses.field(default_factory=dict)
    longest_prompt: Count = 384
    longest_whole: Count = 768
    lattice_width: Count = DecodeConfig.lattice_width
    tuners: Mapping[str, str] = dataclasses.field(default_factory=dict)
    alphas: Sequence[Annotated[float, number(0, 1e6)]] = (0.0, *ALPHAS)
    trained_prompts: str | None = None
    in_domain: Natural = 0
    shown: Natural = 0
    batch_size: Count = 12
    temperatures: Sequence[float] = (0.0,)
    rounds: Count = 1
    speculative: Names = ()

    def check_together(self) -> None:
        """Raises a `UserError` for names that are not defined."""
        if not self.tasks:
            raise UserError("tasks is empty: name at least one.")
        self._check_tuners()
        for name, models in self.assets.items():
            for kind in models:
                if kind not in ASSET_FOLDERS:
                    raise UserError(
                        f"assets[{name!r}] has the unknown kind {kind!r}: there is "
                        f"{', '.join(ASSET_FOLDERS)}."
                    )
        for name in set(self.speculative) - set(self.contenders):
            raise UserError(
                f"speculative names {name!r}, which is not among the contenders."
            )
        for contender in [*self.parsed, *map(parse_contender, self.tuners.values())]:
            if contender.assets is not None and contender.assets not in self.assets:
                raise UserError(
                    f"{contender.name} asks for the models {contender.assets!r}, but "
                    f"assets has {', '.join(self.assets) or 'none'}."
                )

    def _check_tuners(self) -> None:
        for kind, name in self.tuners.items():
            if class_of(parse_contender(name).method) != kind:
                raise UserError(
                    f"tuners[{kind!r}] is {name!r}: use a contender of that class, and "
                    f"as a class one of {', '.join(CLASSES)}."
                )
            if parse_contender(name).method.setting("alpha") is not None:
                raise UserError(f"tuners[{kind!r}] is {name!r}: leave its alpha out.")
        if self.tuners and not self.alphas:
            raise UserError("alphas is empty: give numbers of 0 or more.")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all records of a study share, as JSON values."""
        fields = dataclasses.asdict(self)
        kept = {name: fields[name] for name in fields if name not in _OPEN}
        settings: dict[str, Any] = json.loads(json.dumps(kept))
        return settings

    def differing(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Values of other settings that differ from these, by name.

        Args:
          settings: of an earlier run, perhaps of an earlier version.
        """
        mine = self.settings
        theirs = {**_ADDED, **settings}
        return {n: theirs.get(n) for n in mine if theirs.get(n) != mine[n]}

    def texts_alike(self, facts: Mapping[str, Any]) -> bool:
        """Whether another study, given its facts, decodes the same texts."""
        settings = facts.get("settings") or {}
        return bool(settings) and not set(self.differing(settings)) & set(_DECISIVE)

    def new_tokens(self, task: str) -> int:
        """The largest number of tokens that are decoded for an example."""
        return self.decode_lengths.get(task, self.max_new_tokens)

    @property
    def parsed(self) -> list[Contender]:
        """The contenders."""
        return [parse_contender(name) for name in self.contenders]
