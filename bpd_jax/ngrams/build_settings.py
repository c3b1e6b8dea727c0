"""What to build an n-gram model from, and how: the settings of `build_model`."""

import dataclasses
import math

from bpd_jax.errors import UserError
from bpd_jax.ngrams.counting.bounded import DEFAULT_MEMORY
from bpd_jax.ngrams.counting.counts import MOST_ORDERS
from bpd_jax.ngrams.katz import DEFAULT_BINS, MOST_BINS
from bpd_jax.ngrams.model import HIGHEST_UNSEEN

DEFAULT_ORDER = 4
SOURCES = ("task", "text", "tokens", "generations", "counts", "model")
TEXT_SOURCES = ("task", "text")
SPLIT_SOURCES = (*TEXT_SOURCES, "generations")

# What `symbols` may be beside the path of a table.
IDS, STRINGS = "ids", "strings"

# Settings that say something of some sources only.
_ONLY_WITH = {
    "split": SPLIT_SOURCES,
    "max_bytes": TEXT_SOURCES,
    "heldout_split": SPLIT_SOURCES,
    "vocab_size": ("tokens", "counts", "model"),
    "end_of_text": ("tokens", "counts", "model"),
    "order": ("task", "text", "tokens", "generations", "counts"),
    "min_counts": ("task", "text", "tokens", "generations", "counts"),
    "weight": ("model",),
    "model_symbols": ("model",),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to build from what.

    Attributes:
      output: folder to write; an older model there is replaced.
      task: name of a text task.
      text: glob of text files.
      tokens: glob of files of token ids.
      generations: folder of texts that a model wrote.
      counts: folder of counts, or a text file of them.
      model: one model to prune or to convert, or two to mix; see `formats.load_model`.
        Just one of these six is given.
      weight: of two models: the share of the first.
      model_symbols: symbol table of model files; None where they hold token ids.
      order: N; None for 4, or for all orders of `counts`.
      min_counts: per order, or None for 1 everywhere.
      max_ngrams: prune to at most this many, or None.
      theta: prune what changes the perplexity by at most this factor, or None.
      max_per_order: prune each order from the bigrams up to at most this many; None
        for no limit.
      bins: highest count with a Good-Turing discount.
      memory: bytes for counting.
      vocabulary: of text: `task`, `text` and `heldout_text`.
      split: of `task`, `text` and `generations`; None for `all` of a text, else
        `train`.
      max_bytes: of `task` and `text`: bytes of text to take, both splits together.
      heldout_split: a split to measure perplexity on, or None.
      heldout_text: a glob of text files to measure perplexity on, or None.
      heldout_tokens: a glob of files of token ids to measure perplexity on, or None.
      vocab_size: of files of ids; None for the highest id plus 1.
      end_of_text: of files of ids; see `NGramModel`.
      unseen_log_prob: natural logarithm of the probability that tokens of the
        vocabulary without a unigram get, or None for no unigram.
      symbols: what to write for tokens: `ids`, `strings` (those of the vocabulary) or
        the path of a symbol table.
    """

    output: str
    task: str | None = None
    text: str | None = None
    tokens: str | None = None
    generations: str | None = None
    counts: str | None = None
    model: tuple[str, ...] = ()
    weight: float | None = None
    model_symbols: str | None = None
    order: int | None = None
    min_counts: tuple[int, ...] | None = None
    max_ngrams: int | None = None
    theta: float | None = None
    max_per_order: tuple[int | None, ...] | None = None
    bins: int = DEFAULT_BINS
    memory: int = DEFAULT_MEMORY
    vocabulary: str = "gpt3"
    split: str | None = None
    max_bytes: int | None = None
    heldout_split: str | None = None
    heldout_text: str | None = None
    heldout_tokens: str | None = None
    vocab_size: int | None = None
    end_of_text: int | None = None
    unseen_log_prob: float | None = None
    symbols: str = IDS

    def __post_init__(self) -> None:
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(f"--{name}" for name in given) or "none"
            *names, last = (f"--{name}" for name in SOURCES)
            raise UserError(
                f"give exactly one of {', '.join(names)} and {last}: found {found}."
            )
        for name, sources in _ONLY_WITH.items():
            if getattr(self, name) is not None and given[0] not in sources:
                *names, last = (f"--{source}" for source in sources)
                several = f"{', '.join(names)} and {last}" if names else last
                raise UserError(f"--{name} goes with {several} only.")
        heldout = ("heldout_split", "heldout_text", "heldout_tokens")
        if sum(getattr(self, name) is not None for name in heldout) > 1:
            raise UserError(
                "give at most one of --heldout_split, --heldout_text and "
                "--heldout_tokens."
            )
        if self.heldout_text is not None and self.vocabulary.startswith("bpe:"):
            raise UserError(
                f"--vocabulary={self.vocabulary} is trained on the text itself, so "
                "--heldout_text would get another one: give --heldout_split, or the "
                "vocabulary of both as a tokenizer.json."
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("order", "max_ngrams", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}: it must be 1 or more.")
        if self.order is not None and self.order > MOST_ORDERS:
            raise UserError(
                f"--order is {self.order:,}: it must be at most {MOST_ORDERS}."
            )
        order = self.order or (None if self.counts else DEFAULT_ORDER)
        if self.min_counts is not None and order not in (None, len(self.min_counts)):
            raise UserError(
                f"--min_counts has {len(self.min_counts)} numbers, but --order is "
                f"{order}: give one number per order, such as 1,1,2,4."
            )
        if self.theta is not None and not self.theta >= 0:
            raise UserError(f"--theta is {self.theta}: it must be 0 or more.")
        if not 1 <= self.bins <= MOST_BINS:
            raise UserError(
                f"--bins is {self.bins}: it must lie between 1 and {MOST_BINS:,}."
            )
        unseen = self.unseen_log_prob
        if unseen is not None and not -math.inf < unseen <= HIGHEST_UNSEEN:
            raise UserError(
                f"--unseen_log_prob is {unseen}: give {HIGHEST_UNSEEN:g} or less, so "
                "that the model still sums to one."
            )
        if self.model and (len(self.model) > 2 or not all(self.model)):
            raise UserError("--model takes one model, or two with a comma between.")
        if (len(self.model) == 2) != (self.weight is not None):
            raise UserError(
                "--weight is the share of the first of two models: give --model=A,B "
                "and --weight=0.7, or one model and no weight."
            )
        if self.weight is not None and not 0 < self.weight < 1:
            raise UserError(f"--weight is {self.weight}: it must lie between 0 and 1.")

    @property
    def prunes(self) -> bool:
        """Whether n-grams may go."""
        limits = (self.max_ngrams, self.theta, self.max_per_order)
        return any(limit is not None for limit in limits)
