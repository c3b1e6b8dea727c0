"""What is read, in which vocabulary: the plain data that names a text task."""

import dataclasses
import re
from typing import Annotated

from bpd_jax.errors import UserError
from bpd_jax.settings import Count, Validated, Words, choice, number

SPLITS = ("train", "validation")
ALL = "all"  # both splits together
CORPORA = ("stdlib", "text_files")  # of text
# Token ids that a model wrote: see `bpd_jax.data.generations`.
GENERATIONS = "generations"

# A byte-level vocabulary holds every byte and the end-of-text token.
SMALLEST_VOCABULARY = 257

Fraction = Annotated[float, number(above=0, below=1)]


@dataclasses.dataclass(frozen=True)
class TextTask(Validated):
    """A corpus, its split into train and validation, and its vocabulary.

    Attributes:
      corpus: `stdlib` (the sources of Python's standard library on this machine),
        `text_files`, or `generations`: token ids of texts that a model wrote.
      text_files: a glob for the user's own files; `**` crosses folders. A `.jsonl`
        or `.jsonl.gz` file holds one document a line in the field `text`; any
        other file is one document of UTF-8 text. Of `generations`: their folder.
      vocabulary: `gpt3`; `bpe:N`, a byte-level BPE of N tokens trained on the
        train split; or the path of a tokenizer.json or of a folder holding one, such
        as that of `generations`.
      validation_fraction: share of the documents kept for validation.
      max_bytes: bytes of UTF-8 text to take, both splits together; None for all.
    """

    prefix = ""

    corpus: Annotated[str, choice(*CORPORA, GENERATIONS)] = "stdlib"
    text_files: str | None = None
    vocabulary: Words = "gpt3"
    validation_fraction: Fraction = 0.02
    max_bytes: Count | None = None

    def check_together(self) -> None:
        """Raises a `UserError` for settings of another corpus."""
        if self.corpus == "text_files" and not self.text_files:
            raise UserError(
                "the corpus text_files needs text_files, a glob such as "
                "'books/**/*.txt'."
            )
        if self.corpus == GENERATIONS and not self.text_files:
            raise UserError(
                "the corpus generations needs text_files, the folder that "
                "bpd_jax.distill wrote."
            )
        if self.corpus == "stdlib" and self.text_files:
            raise UserError(
                f"text_files={self.text_files!r} is given but corpus is "
                f"{self.corpus!r}: set corpus to 'text_files'."
            )
        if self.trained_size is not None and self.corpus == GENERATIONS:
            raise UserError(
                f"vocabulary is {self.vocabulary!r}, but generations are token ids "
                "already: give the tokenizer.json of the model that wrote them."
            )
        if self.max_bytes is not None and self.corpus == GENERATIONS:
            raise UserError("max_bytes goes with text, not with generations.")

    @property
    def name(self) -> str:
        """The name of the seqio task, such as `stdlib.gpt3` or `stdlib.bpe:2048`."""
        return f"{self.corpus}.{short_vocabulary(self.vocabulary)}"

    @property
    def trained_size(self) -> int | None:
        """N of the vocabulary `bpe:N`, or None for every other vocabulary."""
        return trained_size(self.vocabulary)


def trained_size(vocabulary: str) -> int | None:
    """N of the vocabulary `bpe:N`, or None for every other vocabulary.

    >>> trained_size("bpe:2048")
    2048
    """
    if not vocabulary.startswith("bpe:"):
        return None
    number = re.fullmatch(r"bpe:(\d+)", vocabulary)
    if number is None or int(number[1]) < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocabulary {vocabulary!r} is not bpe:N with N of at least "
            f"{SMALLEST_VOCABULARY} (256 bytes and the end-of-text token)."
        )
    return int(number[1])


def short_vocabulary(vocabulary: str) -> str:
    """The vocabulary in the name of a task: a path is `custom`."""
    is_name = vocabulary == "gpt3" or trained_size(vocabulary) is not None
    return vocabulary if is_name else "custom"


def check_split(split: str) -> None:
    """Raises a `UserError` unless `split` is one of `SPLITS`, or `ALL`."""
    if split not in (*SPLITS, ALL):
        raise UserError(f"unknown split {split!r}: use {', '.join(SPLITS)} or {ALL}.")
