"""Perplexity of passages, and accuracy on their last words.

For LAMBADA (Paperno et al. 2016). The paper's Table 1 prints a perplexity without
stating of which tokens, so both are measured: of complete passages and of last words.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.errors import UserError
from bpd_jax.evaluation.scoring import score_texts
from bpd_jax.models.model import Model

Encode = Callable[[str], Sequence[int]]


def split_last_word(passage: str) -> tuple[str, str]:
    """Splits a passage into the text before its last word and that word, both stripped.

    >>> split_last_word("i do n't care about signs")
    ("i do n't care about", 'signs')
    """
    match = re.search(r"(?s)(.*\S)\s+(\S+)\s*$", passage)
    if match is None:
        raise UserError(
            f"the passage {passage!r:.60} has fewer than two words: LAMBADA scores the "
            "last word after the words before it."
        )
    return match[1], match[2]


def passage_scores(
    model: Model,
    encode: Encode,
    passages: Sequence[str],
    *,
    begin_of_text: int | None = None,
    batch_size: int = 1,
) -> list[dict[str, float]]:
    """Scores passages by teacher forcing.

    Worked example: `the cat sat` has the tokens `th e _ca t _s at`. The tokens `e _ca t
    _s at` are scored; the first token has no context. The last word is `_s at`; it is
    correct if greedy decoding after `the cat` generates it.

    Args:
      encode: the model's tokenizer.
      passages: texts of at least two words.
      begin_of_text: token that the model's texts begin with, if any. It precedes the
        passage; the first token of the passage is not scored in this case either.
      batch_size: number of passages processed together.

    Returns:
      For each passage `log_prob` (in nats) of its `tokens` tokens after the first;
      `last_word`, 1 if greedy decoding generates the last word, else 0; and
      `last_word_log_prob` of its `last_word_tokens` tokens.
    """
    begin = [] if begin_of_text is None else [begin_of_text]
    texts: list[tuple[np.ndarray, int]] = []
    for passage in passages:
        context, _ = split_last_word(passage)
        ids = list(encode(passage.rstrip()))
        tokens = np.array([*begin, *ids], np.int32)
        # A token may span the end of the context and the beginning of the last word.
        last = max(len(ids) - len(encode(context)), 1)
        texts += [(tokens, len(ids) - 1), (tokens, last)]
    scores = dict(
        progress.bar(
            score_texts(model, texts, batch_size=batch_size),
            label="passages",
            total=len(texts),
            unit="score",
        )
    )
    return [
        {
            "log_prob": scores[index].log_prob,
            "tokens": float(texts[index][1]),
            "last_word": float(scores[index + 1].is_greedy),
            "last_word_log_prob": scores[index + 1].log_prob,
            "last_word_tokens": float(texts[index + 1][1]),
        }
        for index in range(0, len(texts), 2)
    ]
