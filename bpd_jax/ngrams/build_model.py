"""Builds the folder of an n-gram model: counts, estimates, prunes and writes."""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator

from bpd_jax.base.errors import UserError
from bpd_jax.data import corpora, text_task, tokenizer
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.ngrams.build_settings import DEFAULT_ORDER, IDS, STRINGS, BuildSettings
from bpd_jax.ngrams.counting import bounded_memory, sorted_runs, sources
from bpd_jax.ngrams.counting.counts import NGramCounts, with_min_counts
from bpd_jax.ngrams.evaluation import Evaluation, evaluate
from bpd_jax.ngrams.formats import arpa, openfst
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.ngrams.formats.symbols import (
    check_symbols,
    printable_symbols,
    read_symbols,
    write_symbols,
)
from bpd_jax.ngrams.katz import estimate_katz
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.prune import prune
from bpd_jax.storage import folders
from bpd_jax.storage.paths import as_path, work_place

__all__ = ["BuildReport", "BuildSettings", "Measure", "build"]

ARPA_FILE = "model.arpa.gz"
FST_FILE = "model.fst"
SYMBOLS_FILE = "symbols.txt"


@dataclasses.dataclass(frozen=True)
class Measure:
    """The evaluation of a model on a text.

    Attributes:
      text: name of the text.
      model: the model that was written.
      unpruned: the model before pruning, or None if nothing was pruned.
    """

    text: str
    model: Evaluation
    unpruned: Evaluation | None


@dataclasses.dataclass
class BuildReport:
    """A summary of the build.

    Attributes:
      tokens: tokens counted; 0 if a model was read.
      sequences: documents or lines counted.
      counted: n-grams per order in the text or in the model that was read.
      kept: n-grams per order after the minimum counts.
      pruned: n-grams per order in the model.
      seconds: duration of each stage.
      measure: perplexities on held-out text, or else on the counted text; None if
        neither is available.
      written: path and size in bytes of each file.
    """

    tokens: int = 0
    sequences: int = 0
    counted: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    pruned: tuple[int, ...] = ()
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    measure: Measure | None = None
    written: dict[pathlib.Path, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the duration of the block."""
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


def build(settings: BuildSettings) -> BuildReport:
    """Builds a model and writes the output folder atomically.

    The folder contains `model.arpa.gz`, `model.fst`, the arrays for `NGramModel.load`
    and, if tokens are written as strings, `symbols.txt`. If counting on disk is killed,
    its partial results remain in `OUTPUT.work`, and the same command resumes.
    """
    output = as_path(settings.output)
    folders.check_folder(output, NGramModel.kind)
    work = work_place(output.with_name(f"{output.name}.work"))
    report = BuildReport()
    # All inputs are validated before the long computation.
    heldout, symbols = _heldout(settings), _symbols(settings)
    unigrams = NGramModel.load(settings.unigrams) if settings.unigrams else None
    check_fit = functools.partial(_check_fit, settings, symbols, heldout)
    source = None
    if settings.model:
        with report.stage("read"):
            unpruned = _read_model(settings)
        check_fit(unpruned.order, unpruned.vocab_size)
        report.counted = report.kept = unpruned.sizes
    else:
        if not settings.counts:
            source = sources.source_of(settings)
            check_fit(settings.order or DEFAULT_ORDER, source.vocab_size)
        with report.stage("count"):
            counts = _counts(settings, source, work)
        if source is None:
            check_fit(settings.order or len(counts.seen), counts.vocab_size)
        report.tokens, report.sequences = counts.tokens, counts.sequences
        report.counted, report.kept = counts.seen, counts.sizes
        with report.stage("estimate"):
            unpruned = estimate_katz(counts, settings.bins)
        del counts
    model = unpruned
    if settings.prunes:
        with report.stage("prune"):
            model = prune(
                unpruned,
                settings.max_ngrams,
                theta=settings.theta,
                max_per_order=settings.max_per_order,
            )
    if unigrams is not None:
        model = model.interpolated(unigrams, settings.unigrams_share)
    report.pruned = model.sizes
    with report.stage("measure"):
        texts = {"held-out text": heldout, "training text": source}
        report.measure = _measure(unpruned, model, texts)
    del unpruned
    if settings.unseen_log_prob is not None:
        model = model.with_unseen_tokens(settings.unseen_log_prob)
    with (
        report.stage("write"),
        folders.replacing_folder(output, NGramModel.kind) as temporary,
    ):
        model.save_into(temporary, compact=settings.compact)
        openfst.write_fst(model, temporary / FST_FILE, symbols)
        arpa.write_arpa(model, temporary / ARPA_FILE, symbols)
        if symbols is not None:
            write_symbols(symbols, temporary / SYMBOLS_FILE)
    with contextlib.suppress(UserError):  # The model is complete.
        folders.remove_folder(work, sorted_runs.KIND)
    report.written = {path: path.stat().st_size for path in sorted(output.iterdir())}
    return report


def _heldout(settings: BuildSettings) -> sources.TokenSource | None:
    split, text = settings.heldout_split, settings.heldout_text
    if split is not None:
        return sources.source_of(dataclasses.replace(settings, split=split))
    if text is None and settings.heldout_tokens is None:
        return None
    return sources.open_source(
        text=text,
        tokens=settings.heldout_tokens,
        vocabulary=settings.generations or settings.vocabulary,
    )


def _check_fit(
    settings: BuildSettings,
    symbols: list[str] | None,
    heldout: sources.TokenSource | None,
    order: int,
    vocab_size: int,
) -> None:
    """Checks that settings match the order and the vocabulary."""
    limits = settings.max_per_order or ()
    if len(limits) >= order:
        raise UserError(
            f"--max_per_order has {len(limits)} numbers, but the n-grams have up to "
            f"{order} symbols: give at most {order - 1}, from the bigrams up."
        )
    if symbols is not None and len(symbols) != vocab_size:
        table = f"--symbols={settings.symbols}"
        if settings.symbols == STRINGS:
            table = f"--vocabulary={settings.vocabulary}"
        raise UserError(
            f"{table} has {len(symbols)} entries for {vocab_size} tokens: give the "
            "table of the ids, and when counting ids their number as --vocab_size."
        )
    if heldout is None:
        return
    if heldout.vocab_size > vocab_size:
        raise UserError(
            f"the held-out text {heldout.name} has tokens up to "
            f"{heldout.vocab_size - 1}, but the vocabulary is 0 ... {vocab_size - 1}: "
            "give text of the same vocabulary, or count with --vocab_size="
            f"{heldout.vocab_size}."
        )
    reason = f"the held-out text {heldout.name} has no documents"
    try:
        if next(heldout.sequences(), None) is not None:
            return
    except corpora.EmptySplitError as error:
        reason = error.reason
    raise UserError(
        f"{reason}: give more text, or other held-out text with --heldout_text or "
        "--heldout_tokens."
    )


def _counts(
    settings: BuildSettings, source: sources.TokenSource | None, work: pathlib.Path
) -> NGramCounts:
    if source is not None:
        return bounded_memory.count(
            source,
            work,
            order=settings.order or DEFAULT_ORDER,
            min_counts=settings.min_counts,
            memory=settings.memory,
        )
    path = as_path(settings.counts or "")
    counts = NGramCounts.load(path)
    if settings.order is not None:
        if settings.order > len(counts.seen):
            raise UserError(
                f"--order is {settings.order}, but {path} has n-grams of up to "
                f"{len(counts.seen)} symbols: leave --order out, or count again."
            )
        counts = dataclasses.replace(
            counts,
            keys=counts.keys[: settings.order],
            counts=counts.counts[: settings.order],
            followed=counts.followed[: settings.order - 1],
            seen=counts.seen[: settings.order],
        )
    if settings.min_counts is not None:
        counts = with_min_counts(counts, settings.min_counts)
    return counts


def _read_model(settings: BuildSettings) -> NGramModel:
    path = as_path(settings.model or "")
    for name in ("vocab_size", "end_of_text", "model_symbols"):
        if path.is_dir() and getattr(settings, name) is not None:
            raise UserError(
                f"--{name} applies to ARPA files only, not to the folder {path}: leave "
                "it out."
            )
    table = settings.model_symbols
    return load_model(
        path,
        vocab_size=settings.vocab_size,
        end_of_text=settings.end_of_text,
        symbols=None if table is None else read_symbols(table),
    )


def _symbols(settings: BuildSettings) -> list[str] | None:
    """The symbol table of the written files; None for ids."""
    if settings.symbols == IDS:
        return None
    if settings.symbols != STRINGS:
        symbols = read_symbols(settings.symbols)
        check_symbols(len(symbols), symbols)
        return symbols
    names = _tokenizer(settings)
    return printable_symbols(map(names.piece, range(names.vocab_size)))


def _tokenizer(settings: BuildSettings) -> tokenizer.Tokenizer:
    if settings.text or settings.task in text_task.CORPORA:
        task = text_task.TextTask(
            settings.task or "text_files",
            settings.text,
            settings.vocabulary,
            max_bytes=settings.max_bytes,
        )
        return task_tokenizer(task)
    return tokenizer.named_tokenizer(settings.generations or settings.vocabulary)


def _measure(
    unpruned: NGramModel,
    model: NGramModel,
    texts: dict[str, sources.TokenSource | None],
) -> Measure | None:
    """Measures perplexity on the first available text."""
    models = [model] if model is unpruned else [model, unpruned]
    for name, text in texts.items():
        if text is not None:
            after, *before = evaluate(models, text.sequences())
            return Measure(name, after, before[0] if before else None)
    return None
