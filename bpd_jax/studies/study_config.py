"""The settings of a study: model, tasks, contenders, numbers of examples."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    TEXT,
    Count,
    Natural,
    NonNegative,
    Path,
    Validated,
    choice,
    configurable,
    each,
    number,
)
from bpd_jax.decoding.asset_files import ASSET_FOLDERS
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeConfig, DecodeOptions
from bpd_jax.models.mesh import MeshConfig

BPD = "bpd"

# Settings that may change while earlier records of a study stay valid; digests of their
# contents identify data and models (`StudyContext.digest`, `.made_with`).
_MUTABLE = (
    "assets",
    "batch_size",
    "batched",
    "contenders",
    "data",
    "labels",
    "mesh",
    "notes",
    "printed",
    "rounds",
    "shown",
    "speculative",
    "study",
    # `StudyContext.made_with` covers the α of contenders.
    "alphas",
    "grids",
    "pooled",
    "tuners",
)
# Settings that determine the texts and the drafts along them.
_TEXT_SETTINGS = (
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
    "text_temperature",
    "draft_noise",
    "source",
)
# Settings that headers of earlier versions lack, with the values that they imply.
_ADDED_SETTINGS: dict[str, Any] = {
    "decode_lengths": {},
    "draft_noise": 0.0,
    "source": "heads",
    "text_temperature": 0.0,
    "turns": 1,
}
TASK_FIELD = "{task}"

TUNED = ("alpha", "temperature", "heads")
"""Settings that `StudyConfig.grids` may tune."""

ALPHAS = (0.1, 0.5, 0.75, 0.9, 1.0, 1.1, 1.5, 2.0, 5.0, 10.0)
"""The weights that the paper evaluates (appendix E)."""

Names = Annotated[Sequence[str], each(TEXT, distinct=True)]


@dataclasses.dataclass(frozen=True)
class Contender:
    """A method together with the models that it drafts with.

    Attributes:
      name: `METHOD`, or `METHOD@SET` if SET of `StudyConfig.assets` has its models.
      assets: SET; None for the model's own assets.
    """

    name: str
    method: Method
    assets: str | None = None


def parse_contender(name: str) -> Contender:
    """Parses the name of a contender.

    >>> parse_contender("ngram:16@general_4").assets
    'general_4'
    """
    method, at, assets = name.partition("@")
    return Contender(name, parse_method(method), assets if at else None)


CLASSES = ("ngram", "neural")
"""Classes of rescorers that share a weight α."""


def class_of(method: Method) -> str | None:
    """The class of a method's rescorer; None without a rescorer or with several.

    >>> class_of(parse_contender("medusa_ngram:8").method)
    'ngram'
    """
    classes = [name for name in CLASSES if name in method.refiner_names]
    return classes[0] if len(classes) == 1 else None


@configurable
@dataclasses.dataclass(frozen=True)
class StudyConfig(Validated):
    """The settings of one study at one size.

    Attributes:
      study: name of the study, a folder of experiments/.
      size: name of the size, from the gin file.
      model: run folder, checkpoint or known name. If every task has a finetuned model,
        `{task}` stands for the name of the task.
      data: folder of the tasks: JSON Lines, `NAME/SPLIT.jsonl.gz`, or data sets that
        TensorFlow Datasets has prepared; None if only the model's own held-out text is
        used.
      tasks: names of the tasks; see `bpd_jax.studies.tasks`.
      contenders: methods to replay, each with `@SET` if it uses models of `assets`.
      source: source of the contenders that are named after the paper's methods, such as
        `bpd` and `ngram:16`: the model's block `heads`, or its `block` drafter. "BPD"
        then stands for the unrefined draft of that source.
      assets: sets of models: SET → kind (`ngram`, `rescorer`, …) → folder. `{task}` in
        a folder stands for the name of the task.
      labels: display names of contenders that replace the labels of their methods.
      printed: contender → column of the paper's table that it is compared with; see
        `experiments.printed`.
      notes: sentences shown with the results.
      examples, tune: numbers of examples of each task to report on and to tune on;
        the two sets are disjoint.
      turns: number of turns of a conversation: 1 for the first one, 2 for both of
        MT-Bench. A later turn is a separate example, whose prompt contains the model's
        greedy answers to the earlier ones.
      max_new_tokens: maximum number of tokens decoded for each example.
      decode_lengths: the same by task, in place of `max_new_tokens`.
      longest_prompt: maximum number of tokens of a prompt with a document; longer
        documents are truncated. The limit is lower if the model has too few positions
        for the prompt and the decoded tokens.
      longest_whole: maximum number of tokens of a prompt without a document; longer
        prompts are left out.
      lattice_width: k of contenders that do not set k.
      tuners: class of rescorers (`ngram`, `neural`) → the contender on which its weight
        α is tuned, for each task, on the `tune` examples. All contenders of the class
        that do not set α use the result (paper, appendix E). With {} α is 1.
      grids: setting of a method (`alpha`, `temperature`, `heads`) → the values to
        choose from for every contender that has the setting and does not set it, each
        contender with its own models, search and number of drafts; see
        `bpd_jax.studies.tuning`. A grid of `alpha` replaces `tuners`.
      pooled: whether `grids` are tuned once, on the tuning examples of all tasks, and
        not for each task.
      alphas: values of α to choose from with `tuners`: by default the paper's grid.
        α = 0, which it does not print, is tried as well, and where it would win this is
        said, but it is not chosen unless it is listed here.
      text_temperature: temperature at which replayed texts are sampled; 0 is greedy.
        All methods sample the same text, and accept a draft token if it is the token
        of this text (acceptance `exact`), so that replay counts their calls.
      draft_noise: weight of the random numbers of sampled texts in the predictions that
        are replayed; see `DecodeOptions`.
      trained_prompts: file of prompts that block heads were trained on; examples whose
        documents they contain are left out.
      in_domain: number of texts of each task, neither reported nor tuned on, from which
        in-domain n-gram models are built (Table 7); 0 builds none.
      shown: number of examples of each task in the draft explorer.
      batch_size: number of texts decoded together.
      temperatures, rounds: temperatures and number of rounds of the studies that
        measure time.
      speculative: contenders that, above temperature 0, are timed with speculative
        sampling too.
      batched: contenders that are timed with batched verification too, in which every
        draft is a row of the pass, as in the paper.
      mesh: the devices that decode; None for the first one.
    """

    prefix = ""

    study: str
    model: Path
    size: str = ""
    data: Path | None = None
    tasks: Names = ()
    contenders: Names = ()
    source: Annotated[str, choice("heads", "block")] = "heads"
    assets: Mapping[str, Mapping[str, Path]] = dataclasses.field(default_factory=dict)
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
    grids: Mapping[str, Sequence[Annotated[float, number(0, 1e6)]]] = dataclasses.field(
        default_factory=dict
    )
    pooled: bool = False
    alphas: Sequence[Annotated[float, number(0, 1e6)]] = ALPHAS
    text_temperature: Annotated[float, number(0, 1e6)] = 0.0
    draft_noise: NonNegative = 0.0
    trained_prompts: Path | None = None
    in_domain: Natural = 0
    shown: Natural = 0
    batch_size: Count = 12
    temperatures: Sequence[float] = (0.0,)
    rounds: Count = 1
    speculative: Names = ()
    batched: Names = ()
    mesh: MeshConfig | None = None

    def check_together(self) -> None:
        """Refuses undefined names."""
        if not self.tasks:
            raise UserError("tasks is empty: name at least one.")
        DecodeOptions(temperature=self.text_temperature)  # Checks it.
        if self.draft_noise and not self.text_temperature:
            raise UserError("draft_noise is for sampled texts: set text_temperature.")
        for kind, name in self.tuners.items():
            method = parse_contender(name).method
            if class_of(method) != kind or method.setting("alpha") is not None:
                raise UserError(
                    f"tuners[{kind!r}] is {name!r}: it must map one of the classes "
                    f"{', '.join(CLASSES)} to a contender of that class without alpha."
                )
        if self.tuners and not self.alphas:
            raise UserError("alphas is empty: give non-negative numbers.")
        for setting, values in self.grids.items():
            if setting not in TUNED or not values:
                raise UserError(
                    f"grids[{setting!r}] must list values of one of {', '.join(TUNED)}."
                )
        for name, models in self.assets.items():
            for kind in models:
                if kind not in ASSET_FOLDERS:
                    raise UserError(
                        f"assets[{name!r}] has the unknown kind {kind!r}: use "
                        f"{', '.join(ASSET_FOLDERS)}."
                    )
        for field in ("speculative", "batched"):
            for name in set(getattr(self, field)) - set(self.contenders):
                raise UserError(
                    f"{field} names {name!r}, which is not one of the contenders."
                )
        for contender in [*self.parsed, *map(parse_contender, self.tuners.values())]:
            if contender.assets is not None and contender.assets not in self.assets:
                raise UserError(
                    f"{contender.name} requires the set {contender.assets!r}, but "
                    f"assets defines {', '.join(self.assets) or 'no set'}."
                )

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all records of a study share, as JSON values."""
        fields = dataclasses.asdict(self)
        fixed = {name: fields[name] for name in fields if name not in _MUTABLE}
        settings: dict[str, Any] = json.loads(json.dumps(fixed))
        return settings

    def differing(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `settings` that differ from these, by name.

        Args:
          settings: settings of an earlier run, perhaps of an earlier version.
        """
        earlier = {**_ADDED_SETTINGS, **settings}
        return {
            name: earlier.get(name)
            for name, value in self.settings.items()
            if earlier.get(name) != value
        }

    def same_texts(self, facts: Mapping[str, Any]) -> bool:
        """Whether the study with these facts decodes the same texts."""
        settings = facts.get("settings") or {}
        return bool(settings) and not set(self.differing(settings)) & set(
            _TEXT_SETTINGS
        )

    def new_tokens(self, task: str) -> int:
        """The maximum number of tokens that are decoded for an example."""
        return self.decode_lengths.get(task, self.max_new_tokens)

    @property
    def parsed(self) -> list[Contender]:
        """The parsed contenders."""
        return [parse_contender(name) for name in self.contenders]
