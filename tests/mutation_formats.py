"""All formats that `tests/mutations.py` damages; each module adds some of them."""

from tests.formats import artifacts, models, ngrams, records, texts
from tests.formats.registry import FORMATS

__all__ = ["FORMATS", "artifacts", "models", "ngrams", "records", "texts"]
