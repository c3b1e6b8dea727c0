"""Loads n-gram models: folders and ARPA files."""

import os
from collections.abc import Sequence

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.formats.arpa_reader import read_arpa
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.storage.paths import as_path


def load_model(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    symbols: Sequence[str] | None = None,
) -> NGramModel:
    """Loads a folder that `NGramModel.save` wrote, or an ARPA file.

    Args:
      path: a folder or a file.
      vocab_size: for a file: V; None for the highest id plus 1.
      end_of_text: for a file; see `NGramModel`.
      symbols: for a file: names of the tokens; None for token ids.
    """
    path = as_path(path)
    if path.is_dir():
        return NGramModel.load(path)
    if not path.exists():
        raise UserError(
            f"there is no {path}: give the folder of an n-gram model or an ARPA file."
        )
    if path.suffix == ".fst":
        raise UserError(
            f"{path} is an automaton, which is written for OpenFst and not read: give "
            "the folder of the n-gram model or its ARPA file (OpenGrm's ngramprint "
            "--ARPA writes one)."
        )
    return read_arpa(
        path, vocab_size=vocab_size, end_of_text=end_of_text, symbols=symbols
    )
