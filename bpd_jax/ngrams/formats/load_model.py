"""Loads n-gram models of all supported formats."""

import os
from collections.abc import Sequence

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage.paths import as_path


def load_model(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    symbols: Sequence[str] | None = None,
) -> NGramModel:
    """Loads a folder that `NGramModel.save` wrote, an automaton or an ARPA file.

    Args:
      path: a folder; a file whose name ends in `.fst`; or an ARPA file.
      vocab_size: for a file: V; None for the highest id plus 1.
      end_of_text: for a file; see `NGramModel`.
      symbols: for a file: names of the tokens; None for token ids.
    """
    path = as_path(path)
    if path.is_dir():
        return NGramModel.load(path)
    if not path.exists():
        raise UserError(
            f"there is no {path}: give the folder of an n-gram model, an ARPA file or "
            "an automaton (.fst)."
        )
    # Imported here, so that a folder is loaded without the readers of other formats.
    if path.suffix == ".fst":
        from bpd_jax.ngrams.formats.openfst_reader import model_from_fst as read
    else:
        from bpd_jax.ngrams.formats.arpa_reader import read_arpa as read
    return read(path, vocab_size=vocab_size, end_of_text=end_of_text, symbols=symbols)
