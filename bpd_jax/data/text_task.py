"""The settings of a text task: corpus, split and vocabulary."""

import dataclasses
import re
from typing import Annotated

from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import SMALLEST_VOCABULARY
from bpd_jax.base.settings import Count, Path, Validated, choice, configurable, number

SPLITS = ("train", "validation")
ALL = "all"  # Both splits together.
CORPORA = ("stdlib", "text_files")  # Corpora of text.
# Token ids that a model generated, see `bpd_jax.data.generations`.
GENERATIONS = "generations"

Fraction = Annotated[float, number(above=0, below=1)]


@configurable
@dataclasses.dataclass(frozen=True)
class TextTask(Validated):
    """A corpus, its split into train and validation, and its vocabulary.

    Attributes:
      corpus: `stdlib` (the source files of Python's standard library on this machine),
        `text_files`, or `generations` (token ids of texts that a model generated).
      text_files: for `text_files`, a glob; `**` matches nested folders. A `.jsonl` or
        `.jsonl.gz` file has one document per line in the field `text`; any other file
        is one document of UTF-8 text. For `generations`, their folder.
      vocabulary: `gpt3`; `bpe:N`, a byte-level BPE of N tokens trained on the train
        split; or the path of a tokenizer.json or of a folder that contains one, such as
        that of `generations`.
      validation_fraction: share of the documents held out for validation.
      max_bytes: maximum bytes of UTF-8 text, both splits together; None for all text.
    """

    prefix = ""

    corpus: Annotated[str, choice(*CORPORA, GENERATIONS)] = "stdlib"
    text_files: Path | None = None
    vocabulary: Path = "gpt3"
    validation_fraction: Fraction = 0.02
    max_bytes: Count | None = None

    def check_together(self) -> None:
        """Refuses settings that do not match the corpus."""
        if self.corpus == "stdlib" and self.text_files:
            raise UserError(
                f"text_files={self.text_files!r} is given, but corpus is "
                f"{self.corpus!r}: set corpus to 'text_files'."
            )
        if self.corpus != "stdlib" and not self.text_files:
            raise UserError(
                f"the corpus {self.corpus} needs text_files: a glob such as "
                "'books/**/*.txt', or the folder that bpd_jax.distill wrote."
            )
        of_text = self.trained_size is not None or self.max_bytes is not None
        if of_text and self.corpus == GENERATIONS:
            raise UserError(
                "generations are token ids: leave max_bytes out, and give as the "
                "vocabulary the tokenizer.json of the model that generated them."
            )

    @property
    def name(self) -> str:
        """Its corpus and vocabulary, such as `stdlib.gpt3` or `stdlib.bpe:2048`."""
        return f"{self.corpus}.{short_vocabulary(self.vocabulary)}"

    @property
    def trained_size(self) -> int | None:
        """N of the vocabulary `bpe:N`, or None for every other vocabulary."""
        return trained_size(self.vocabulary)

    @property
    def identity(self) -> dict[str, object]:
        """The settings that determine the texts of a split, without their location."""
        return {
            "corpus": self.corpus,
            "validation_fraction": self.validation_fraction,
            "max_bytes": self.max_bytes,
        }

    def check_split(self, split: str) -> None:
        """Checks that `split` is one of `SPLITS`, or `ALL`."""
        if split not in (*SPLITS, ALL):
            raise UserError(
                f"unknown split {split!r}: use {', '.join(SPLITS)} or {ALL}."
            )


def trained_size(vocabulary: str) -> int | None:
    """N of the vocabulary `bpe:N`, or None for every other vocabulary.

    >>> trained_size("bpe:2048")
    2048
    """
    if not vocabulary.startswith("bpe:"):
        return None
    number = re.fullmatch(r"bpe:(\d{1,18})", vocabulary)
    if number is None or int(number[1]) < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocabulary {vocabulary!r} is not bpe:N with an integer N of at least "
            f"{SMALLEST_VOCABULARY} (256 bytes and the end-of-text token)."
        )
    return int(number[1])


def short_vocabulary(vocabulary: str) -> str:
    """The vocabulary in the name of a task, which is `custom` for a path."""
    is_name = vocabulary == "gpt3" or trained_size(vocabulary) is not None
    return vocabulary if is_name else "custom"
