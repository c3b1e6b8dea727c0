"""How well a model knows passages, and whether it guesses their last words.

LAMBADA (Paperno et al. 2016). The paper's Table 1 prints a perplexity and does not say
of which tokens, so both are measured: that of whole passages, and that of last words.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax import progress
from bpd_jax.errors import UserError
from bpd_jax.evaluation.scoring import score_texts
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Params

Encode = Callable[[str], Sequence[int]]


def split_last_word(passage: str) -> tuple[str, str]:
    """The passage before its last word, without white space at its end, and the word.

    >>> split_last_word("i do n't care about signs")
    ("i do n't care about", 'signs')

    Raises:
      UserError: it has fewer than two words.
    """
    match = re.search(r"(?s)(.*\S)\s+(\S+)\s*$", passage)
    if match is None:
        raise UserError(
            f"the passage {passage!r:.60} has no word before its last one: LAMBADA's "
            "passages have several."
        )
    return match[1], match[2]


def passage_scores(
    model: ModelFunctions,
    params: Params,
    encode: Encode,
    passages: Sequence[str],
    *,
    begin_of_text: int | None = None,
    batch_size: int = 1,
) -> list[dict[str, float]]:
    """Scores passages by teacher forcing.

    Worked example: `the cat sat` in the tokens `th e _ca t _s at`. Scored are `e _ca t
    _s at`, of which `_s at` are the last word's; the first token follows nothing. The
    last word is right if greedy decoding after `the cat` writes `_s at`.

    Args:
      model: functions of the model.
      params: its parameters.
      encode: the model's tokenizer.
      passages: texts of two words and more.
      begin_of_text: token that the model's texts begin with, if any. It is read before
        the passage; the first token of the passage is not scored even so.
      batch_size: passages read together.

    Returns:
      Of each passage `log_prob` (in nats) of `tokens` tokens, all but the first;
      `last_word`, 1 if greedy decoding writes it, else 0; `last_word_log_prob` of
      `last_word_tokens` tokens.

    Raises:
      UserError: a passage has fewer than two words.
    """
    begin = [] if begin_of_text is None else [begin_of_text]
    texts: list[tuple[np.ndarray, int]] = []
    for passage in passages:
        before, _ = split_last_word(passage)
        ids = list(encode(passage.rstrip()))
        tokens = np.array([*begin, *ids], np.int32)
        # One token may hold the end of the one and the beginning of the other.
        last = max(len(ids) - len(encode(before)), 1)
        texts += [(tokens, len(ids) - 1), (tokens, last)]
    found = dict(
        progress.bar(
            score_texts(model, params, texts, batch_size=batch_size),
            label="passages",
            total=len(texts),
            unit="score",
        )
    )
    return [
        {
            "log_prob": found[whole].log_prob,
            "tokens": float(texts[whole][1]),
            "last_word": float(found[whole + 1].is_greedy),
            "last_word_log_prob": found[whole + 1].log_prob,
            "last_word_tokens": float(texts[whole + 1][1]),
        }
        for whole in range(0, len(texts), 2)
    ]
