"""Log-probabilities of texts under a model, by teacher forcing in batches.

With those of the passages of LAMBADA (Paperno et al. 2016) and of their last words. The
paper's Table 1 prints a perplexity without stating of which tokens, so both are
measured.
"""

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base import progress
from bpd_jax.base.compiled import padded_length
from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import even_rows, in_rows, on_host
from bpd_jax.models.programs import Program
from bpd_jax.models.segment_attention import Segments
from bpd_jax.models.transformer_config import check_token_ids

Encode = Callable[[str], Sequence[int]]

# Tokens whose logits over the vocabulary exist at the same time.
_CHUNK = 128


class Score(NamedTuple):
    """The score of a continuation.

    Attributes:
      log_prob: log-probability of all its tokens together, in nats.
      is_greedy: whether greedy decoding would generate it.
    """

    log_prob: float
    is_greedy: bool


class Window(NamedTuple):
    """The inputs and targets of one forward pass.

    Attributes:
      inputs: token ids.
      targets: the tokens that follow the last `len(targets)` inputs.
    """

    inputs: np.ndarray
    targets: np.ndarray


def windows(tokens: np.ndarray, count: int, max_length: int) -> Iterator[Window]:
    """Splits a text into windows that score each of its last `count` tokens once.

    Every window has as much context as fits before its last target. All tokens of 0 …
    10 but the first, with windows of 4 tokens:

        inputs    0 1 2 3    4 5 6 7    6 7 8 9
        targets   1 2 3 4    5 6 7 8        9 10

    Args:
      tokens: the text `[T]`.
      count: number of scored tokens, less than T: the first token has no context.
      max_length: maximum number of inputs.
    """
    for begin in range(len(tokens) - count, len(tokens), max_length):
        end = min(begin + max_length, len(tokens))
        inputs = tokens[max(0, end - 1 - max_length) : end - 1]
        yield Window(inputs, tokens[begin:end])


def score_texts(
    model: Model,
    texts: Sequence[tuple[np.ndarray, int]],
    *,
    batch_size: int = 1,
    max_length: int | None = None,
) -> Iterator[tuple[int, Score]]:
    """Scores the ends of texts, the longest texts first.

    Inputs that several texts share, such as a question with several one-token answers,
    are processed once.

    Args:
      texts: token ids `[T]`, and the number of last tokens to score, less than T.
      batch_size: B, number of windows processed together.
      max_length: tokens of a window; by default the maximum length of the model.

    Yields:
      The index of a text and its score, as soon as the text is complete.
    """
    requests_by_inputs: dict[bytes, list[tuple[int, np.ndarray]]] = defaultdict(list)
    missing: Counter[int] = Counter()
    scores = [Score(0.0, True)] * len(texts)
    window_length = max_length or model.config.trunk.max_length
    for index, (tokens, count) in enumerate(texts):
        tokens = np.asarray(tokens, np.int32)
        check_token_ids(tokens, model.config.trunk.vocab_size, f"text {index + 1}")
        for inputs, targets in windows(tokens, count, window_length):
            requests_by_inputs[inputs.tobytes()].append((index, targets))
            missing[index] += 1
        if not missing[index]:
            yield index, scores[index]

    longest_first = sorted(requests_by_inputs, key=len, reverse=True)
    batch = min(batch_size, len(longest_first))
    for begin in range(0, len(longest_first), max(batch, 1)):
        keys = longest_first[begin : begin + batch]
        rows = [np.frombuffer(key, np.int32) for key in keys]
        indices, requests = [], []
        for row, key in enumerate(keys):
            for index, targets in requests_by_inputs[key]:
                indices.append(index)
                requests.append((row, targets))
        parts = _score_batch(model, rows, requests, batch)
        for index, part in zip(indices, parts, strict=True):
            total = scores[index]
            scores[index] = Score(
                total.log_prob + part.log_prob, total.is_greedy and part.is_greedy
            )
            missing[index] -= 1
            if not missing[index]:
                yield index, scores[index]


def _score_batch(
    model: Model,
    rows: Sequence[np.ndarray],
    requests: Sequence[tuple[int, np.ndarray]],
    batch: int,
) -> list[Score]:
    """Scores targets after rows of inputs.

    Args:
      rows: inputs, the longest first.
      requests: the index of a row, and the targets that follow its last inputs; several
        requests may refer to the same row.
      batch: B; there may be fewer rows.
    """
    longest = padded_length(len(rows[0]), per_octave=2)
    padded = min(longest, model.config.trunk.max_length)
    tokens = np.zeros((even_rows(batch, model.mesh), padded), np.int32)
    for row, inputs in enumerate(rows):
        tokens[row, : len(inputs)] = inputs
    lengths = [len(targets) for _, targets in requests]
    total = sum(lengths)
    # Padding refers to the first token of the first row; its score is ignored.
    indices = np.zeros((3, _CHUNK << max(0, (total - 1) // _CHUNK).bit_length()))
    indices = indices.astype(np.int32)
    ends = np.cumsum(lengths)
    for (row, targets), end in zip(requests, ends, strict=True):
        length = len(rows[row])
        indices[0, end - len(targets) : end] = row
        indices[1, end - len(targets) : end] = np.arange(length - len(targets), length)
        indices[2, end - len(targets) : end] = targets
    log_probs, greedy = on_host(
        _score_targets(model, in_rows(tokens, model.mesh), jnp.asarray(indices))
    )
    # Summing many float32 values would lose digits.
    return [
        Score(
            float(log_probs[end - length : end].sum(dtype=np.float64)),
            bool(greedy[end - length : end].all()),
        )
        for length, end in zip(lengths, ends, strict=True)
    ]


@functools.partial(Program, static=(), constants=("model",), in_order=True)
def _score_targets(
    model: Model,
    tokens: Int[Array, "B T"],
    indices: Int[Array, "3 n"],
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """Log-probabilities of n targets, and whether each is the most probable token.

    Args:
      tokens: inputs, padded at the end.
      indices: for each target its row, the position before it, and the target itself.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, *_ = model.forward(tokens, positions, Segments())

    def score(chunk: Int[Array, "3 chunk"]) -> tuple[Array, Array]:
        row, position, target = chunk
        logits = model.next_token_logits(hidden[row, position])
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        chosen = jnp.take_along_axis(log_probs, target[:, None], axis=-1)[:, 0]
        return chosen, jnp.argmax(logits, axis=-1) == target

    chunks = indices.reshape(3, -1, _CHUNK).swapaxes(0, 1)
    log_probs, greedy = jax.lax.map(score, chunks)
    return log_probs.reshape(-1), greedy.reshape(-1)


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
