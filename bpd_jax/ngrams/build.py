"""From text to the folder of an n-gram model: count, estimate, prune, write."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator

import numpy as np

from bpd_jax import files
from bpd_jax.errors import UserError
from bpd_jax.ngrams import arpa, fst, sources, storage
from bpd_jax.ngrams.counts import count_ngrams, with_min_counts
from bpd_jax.ngrams.katz import DEFAULT_BINS, estimate_katz
from bpd_jax.ngrams.model import Evaluation, NGramModel
from bpd_jax.ngrams.prune import prune

ARPA_FILE = "model.arpa.gz"
FST_FILE = "model.fst"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to build from what; exactly one of task, text and tokens is given.

    Attributes:
      output: folder to write; an older model there is replaced.
      task: name of a text task.
      text: glob of text files.
      tokens: file of token ids.
      order: N.
      min_counts: per order, or None for 1 everywhere.
      max_ngrams: prune to at most this many, or None.
      bins: highest count with a Good-Turing discount.
      vocabulary: of `task` and `text`.
      split: of `task` and `text`; None for `train` of a task, `all` of a text.
      max_bytes: of `task` and `text`: bytes of text to take, both splits together.
      heldout_split: a split to measure perplexity on as well, or None.
      vocab_size: of `tokens`; None for the highest id plus 1.
      end_of_text: of `tokens`; see `NGramModel`.
      unseen_log_prob: natural logarithm of the probability that tokens of the
        vocabulary without a unigram get, or None for no unigram.
    """

    output: str
    task: str | None = None
    text: str | None = None
    tokens: str | None = None
    order: int = 4
    min_counts: tuple[int, ...] | None = None
    max_ngrams: int | None = None
    bins: int = DEFAULT_BINS
    vocabulary: str = "gpt3"
    split: str | None = None
    max_bytes: int | None = None
    heldout_split: str | None = None
    vocab_size: int | None = None
    end_of_text: int | None = None
    unseen_log_prob: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("task", "text", "tokens") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(f"--{name}" for name in given) or "none"
            raise UserError(
                f"give exactly one of --task, --text and --tokens: found {found}."
            )
        if self.order < 1:
            raise UserError(f"--order is {self.order}: it must be 1 or more.")
        if self.min_counts is not None and len(self.min_counts) != self.order:
            raise UserError(
                f"--min_counts has {len(self.min_counts)} numbers, but --order is "
                f"{self.order}: give one number per order, such as 1,1,2,4."
            )
        if self.max_ngrams is not None and self.max_ngrams < 1:
            raise UserError(f"--max_ngrams is {self.max_ngrams}: it must be positive.")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UserError(f"--vocab_size is {self.vocab_size}: it must be positive.")
        if self.unseen_log_prob is not None and self.unseen_log_prob > -50:
            raise UserError(
                f"--unseen_log_prob is {self.unseen_log_prob}: give -50 or less, so "
                "that the model still sums to one."
            )
        if self.tokens and self.heldout_split:
            raise UserError("--heldout_split goes with --task and --text only.")
        if not self.tokens:
            for name in ("vocab_size", "end_of_text"):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"--{name} goes with --tokens only: otherwise the vocabulary "
                        "decides."
                    )


@dataclasses.dataclass
class Report:
    """What was built, for people to read.

    Attributes:
      tokens: tokens read.
      sequences: documents or lines read.
      counted: n-grams per order in the text.
      kept: those left by the minimum counts.
      pruned: those in the model.
      seconds: per stage.
      train: the model on the text it was made from.
      heldout: the model on the held-out split, or None.
      written: path and size in bytes of each file.
    """

    tokens: int = 0
    sequences: int = 0
    counted: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    pruned: tuple[int, ...] = ()
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    train: Evaluation | None = None
    heldout: Evaluation | None = None
    written: dict[pathlib.Path, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the seconds that the block takes."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


def build(settings: Settings) -> Report:
    """Builds a model and writes it; the output folder appears as a whole.

    It gets `model.arpa.gz`, `model.fst` and what `NGramModel.load` reads.

    Raises:
      UserError: the input or a setting is at fault.
    """
    output = pathlib.Path(settings.output)
    _check_output(output)
    report = Report()
    with report.stage("read"):
        heldout = []
        if settings.heldout_split:  # First: it is short, and may be misspelt.
            heldout = list(_documents(settings, settings.heldout_split))
        split = settings.split or ("all" if settings.text else "train")
        documents = list(_documents(settings, split))
        vocab_size, end_of_text = settings.vocab_size, settings.end_of_text
        if not settings.tokens:
            vocab_size, end_of_text = sources.task_vocabulary(
                settings.task or "text_files",
                vocabulary=settings.vocabulary,
                text_files=settings.text,
            )
    report.sequences = len(documents)
    report.tokens = sum(document.size for document in documents)
    if not report.tokens:
        source = settings.tokens or settings.text or settings.task
        raise UserError(f"{source} holds no text to count: the input is empty.")
    with report.stage("count"):
        counts = count_ngrams(
            documents,
            order=settings.order,
            vocab_size=vocab_size,
            end_of_text=end_of_text,
        )
        report.counted = counts.sizes
        if settings.min_counts:
            counts = with_min_counts(counts, settings.min_counts)
        report.kept = counts.sizes
    with report.stage("estimate"):
        model = estimate_katz(counts, settings.bins)
        del counts
    if settings.max_ngrams is not None:
        with report.stage("prune"):
            model = prune(model, settings.max_ngrams)
    report.pruned = model.sizes
    if settings.unseen_log_prob is not None:
        model = model.with_unseen_tokens(settings.unseen_log_prob)
    with report.stage("measure"):
        report.train = model.evaluate(documents)
        if heldout:
            report.heldout = model.evaluate(heldout)
    with report.stage("write"):
        _write(model, output)
    report.written = {path: path.stat().st_size for path in sorted(output.iterdir())}
    return report


def _documents(settings: Settings, split: str) -> Iterator[np.ndarray]:
    if settings.tokens:
        return sources.read_token_file(settings.tokens)
    return sources.read_task(
        settings.task or "text_files",
        split=split,
        vocabulary=settings.vocabulary,
        text_files=settings.text,
        max_bytes=settings.max_bytes,
    )


def _check_output(output: pathlib.Path) -> None:
    """Refuses to replace anything but an older model."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"--output={output} is a file: give a folder.")
    if any(output.iterdir()) and not (output / storage.HEADER).exists():
        raise UserError(
            f"--output={output} holds other files than an n-gram model: give a new "
            "folder."
        )


def _write(model: NGramModel, output: pathlib.Path) -> None:
    with files.replacing_folder(output) as temporary:
        model.save_into(temporary)
        fst.write_fst(model, temporary / FST_FILE)
        arpa.write_arpa(model, temporary / ARPA_FILE)
