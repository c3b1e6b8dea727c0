"""The settings of `count_ngrams` and `build_ngram`."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import (
    BYTES,
    Check,
    Count,
    Natural,
    NonNegative,
    Path,
    Validated,
    each,
    integer,
    number,
)
from bpd_jax.ngrams.counting.bounded_memory import DEFAULT_MEMORY
from bpd_jax.ngrams.counting.windows import MAX_ORDER
from bpd_jax.ngrams.katz import DEFAULT_BINS, MOST_BINS
from bpd_jax.ngrams.model import HIGHEST_UNSEEN

DEFAULT_ORDER = 4
TEXT_SOURCES = ("task", "text")
SPLIT_SOURCES = (*TEXT_SOURCES, "generations")
_COUNTED = (*SPLIT_SOURCES, "tokens", "counts")

_LIMIT = Check(
    "an integer, or all for no limit",
    lambda text: None if text == "all" else int(text),
    integer(0).accepts,
    optional=True,
)

_MEMORY = dataclasses.replace(
    BYTES,
    description=f"{BYTES.description}, 1MB or more",
    accepts=integer(1_000_000).accepts,
)

# Values of `symbols` other than the path of a table.
IDS, STRINGS = "ids", "strings"

# Settings that apply to some sources only.
_ONLY_WITH = {
    "split": SPLIT_SOURCES,
    "max_bytes": TEXT_SOURCES,
    "heldout_split": SPLIT_SOURCES,
    "answers_only": ("generations",),
    "vocab_size": ("tokens", "model"),
    "end_of_text": ("tokens", "model"),
    "order": _COUNTED,
    "min_counts": _COUNTED,
    "memory": _COUNTED,
    "bins": _COUNTED,
    "model_symbols": ("model",),
}


@dataclasses.dataclass(frozen=True)
class CountSettings(Validated):
    """The settings of counting; every field is a flag of `count_ngrams`.

    Attributes:
      output: output folder; an existing one of the same kind is replaced.
      task: text task such as stdlib, or a registered seqio task.
      text: glob of .txt, .jsonl or .jsonl.gz files.
      tokens: glob of files of token ids: a sequence per line, plain or gzip; or .npy
        arrays. `**` matches nested folders.
      generations: folder of texts that a model generated; see bpd_jax.distill.
      answers_only: for generations: count what the model generated, not the prompts.
      vocabulary: for task and text: gpt3, bpe:N, a tokenizer.json or a folder that
        contains one.
      split: for task, text and generations: train, validation or all; by default all
        for text, otherwise train.
      max_bytes: for task and text: bytes of text to use, both splits together; by
        default all.
      vocab_size: for files of token ids: size of the vocabulary; by default the highest
        id plus 1.
      end_of_text: for files of token ids: the token that separates sequences; see
        `NGramModel`.
      order: N, length of the longest n-grams; by default 4, or that of counts.
      min_counts: minimum count of an n-gram, per order, as in 1,1,2,4; by default 1.
      memory: approximate memory for counting, by default 4GB; larger texts are
        counted on disk.
    """

    prefix = "--"
    sources: ClassVar[tuple[str, ...]] = ("task", "text", "tokens", "generations")

    output: Path
    task: str | None = None
    text: Path | None = None
    tokens: Path | None = None
    generations: Path | None = None
    answers_only: bool = False
    vocabulary: Path = "gpt3"
    split: str | None = None
    max_bytes: Count | None = None
    vocab_size: Count | None = None
    end_of_text: Natural | None = None
    order: Annotated[int, integer(1, MAX_ORDER)] | None = None
    min_counts: tuple[Count, ...] | None = None
    memory: Annotated[int, _MEMORY] = DEFAULT_MEMORY

    def check_together(self) -> None:
        """Refuses settings that do not match the source."""
        selected = [name for name in self.sources if getattr(self, name)]
        if len(selected) != 1:
            listed = " and ".join(f"--{name}" for name in selected) or "none"
            raise UserError(
                f"give exactly one of {_flags(self.sources)}: found {listed}."
            )
        for field in dataclasses.fields(self):
            sources = _ONLY_WITH.get(field.name, self.sources)
            is_set = getattr(self, field.name) != field.default
            if is_set and selected[0] not in sources:
                known_sources = [source for source in sources if source in self.sources]
                raise UserError(
                    f"--{field.name} applies to {_flags(known_sources)} only."
                )
        order = self.order or (None if selected == ["counts"] else DEFAULT_ORDER)
        if self.min_counts is not None and order not in (None, len(self.min_counts)):
            raise UserError(
                f"--min_counts has {len(self.min_counts)} numbers, but --order is "
                f"{order}: give one number per order, such as 1,1,2,4."
            )
        if self.min_counts is not None and self.min_counts[:1] != (1,):
            raise UserError(
                "--min_counts must begin with 1, because unigrams are never dropped."
            )


@dataclasses.dataclass(frozen=True)
class BuildSettings(CountSettings):
    """The settings of a build; every field is a flag of `build_ngram`.

    Attributes:
      counts: folder of counts that `count_ngrams` wrote.
      model: a model to prune or convert: a folder, or an ARPA file.
      model_symbols: symbol table of a model file with strings; by default it contains
        token ids.
      max_ngrams: prune to at most this many n-grams of all orders.
      theta: prune n-grams whose removal raises the perplexity by this factor or less,
        such as 1e-8.
      max_per_order: prune to at most this many n-grams per order, from the bigrams up,
        as in 1000000,all,500000.
      bins: highest count with a Good-Turing discount.
      heldout_split: for task, text and generations: split to measure perplexity on.
      heldout_text: glob of text files to measure perplexity on.
      heldout_tokens: glob of files of token ids to measure perplexity on.
      unseen_log_prob: natural logarithm of the probability of unseen tokens, such as
        -1000; by default they have no unigram.
      unigrams: folder of a model of the same tokens, with whose unigrams the model is
        interpolated (paper, appendix D).
      unigrams_share: their weight, above 0 and below 1.
      symbols: names of tokens in the written files: ids; strings, those of the
        vocabulary; or the path of a symbol table.
      compact: store the model in a fifth of the size, or less, with logarithms in half
        precision.
    """

    sources = ("task", "text", "tokens", "generations", "counts", "model")

    counts: Path | None = None
    model: Path | None = None
    model_symbols: Path | None = None
    max_ngrams: Count | None = None
    theta: NonNegative | None = None
    max_per_order: Annotated[tuple[int | None, ...], each(_LIMIT)] | None = None
    bins: Annotated[int, integer(1, MOST_BINS)] = DEFAULT_BINS
    heldout_split: str | None = None
    heldout_text: Path | None = None
    heldout_tokens: Path | None = None
    unseen_log_prob: Annotated[float, number(most=HIGHEST_UNSEEN)] | None = None
    unigrams: Path | None = None
    unigrams_share: Annotated[float, number(above=0, below=1)] = 0.1
    symbols: Path = IDS
    compact: bool = False

    def check_together(self) -> None:
        """Refuses incompatible settings."""
        super().check_together()
        heldout = ("heldout_split", "heldout_text", "heldout_tokens")
        if sum(getattr(self, name) is not None for name in heldout) > 1:
            raise UserError(f"give at most one of {_flags(heldout)}.")
        if self.heldout_text is not None and self.vocabulary.startswith("bpe:"):
            raise UserError(
                f"--vocabulary={self.vocabulary} is trained on the text, so that "
                "--heldout_text would have another vocabulary: give --heldout_split, "
                "or one tokenizer.json for both."
            )

    @property
    def prunes(self) -> bool:
        """Whether the model is pruned."""
        limits = (self.max_ngrams, self.theta, self.max_per_order)
        return any(limit is not None for limit in limits)


def _flags(names: Sequence[str]) -> str:
    *names, last = (f"--{name}" for name in names)
    return f"{', '.join(names)} and {last}" if names else last
