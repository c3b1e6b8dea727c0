"""How likely a model finds known texts: teacher forcing, in batches."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.models.attention import causal_mask
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.typing import Array, Bool, Float, Int, Params

# Tokens whose logits over the vocabulary exist at the same time.
_CHUNK = 128

# The least length that a batch is padded to.
_SHORTEST = 32


class Score(NamedTuple):
    """What a model thinks of some tokens after others.

    Attributes:
      log_prob: of all of them together, in nats.
      is_greedy: whether greedy decoding would have written them.
    """

    log_prob: float
    is_greedy: bool


class Window(NamedTuple):
    """What one forward pass scores.

    Attributes:
      inputs: tokens that the model reads.
      targets: the tokens that follow the last `len(targets)` inputs.
    """

    inputs: np.ndarray
    targets: np.ndarray


def windows(tokens: np.ndarray, count: int, max_length: int) -> Iterator[Window]:
    """Cuts a text into passes that score each of its last `count` tokens once.

    Every pass reads as much as fits before its last target. Worked example: the tokens
    0 … 10, of which all but the first are scored by a model of 4 tokens:

        inputs    0 1 2 3    4 5 6 7    6 7 8 9
        targets   1 2 3 4    5 6 7 8        9 10

    Args:
      tokens: the text `[T]`.
      count: fewer than T: the first token follows nothing.
      max_length: tokens that the model can read.
    """
    for begin in range(len(tokens) - count, len(tokens), max_length):
        end = min(begin + max_length, len(tokens))
        inputs = tokens[max(0, end - 1 - max_length) : end - 1]
        yield Window(inputs, tokens[begin:end])


def score_texts(
    model: ModelFunctions,
    params: Params,
    texts: Sequence[tuple[np.ndarray, int]],
    *,
    batch_size: int = 1,
    max_length: int | None = None,
) -> Iterator[tuple[int, Score]]:
    """Scores the ends of texts, the longest first.

    What several texts read alike, such as a question before several answers of one
    token, is read once.

    Args:
      model: functions of the model.
      params: its parameters.
      texts: token ids `[T]`, and how many of the last ones are scored, fewer than T.
      batch_size: B, windows read together.
      max_length: tokens of a window; by default all that the model can read.

    Yields:
      The index of a text and its score, as soon as it is known.
    """
    readers: dict[bytes, list[tuple[int, np.ndarray]]] = defaultdict(list)
    missing: Counter[int] = Counter()
    scores = [Score(0.0, True)] * len(texts)
    room = max_length or model.config.trunk.max_length
    for index, (tokens, count) in enumerate(texts):
        tokens = np.asarray(tokens, np.int32)
        for inputs, targets in windows(tokens, count, room):
            readers[inputs.tobytes()].append((index, targets))
            missing[index] += 1
        if not missing[index]:
            yield index, scores[index]

    longest_first = sorted(readers, key=len, reverse=True)
    batch = min(batch_size, len(longest_first))
    for begin in range(0, len(longest_first), max(batch, 1)):
        read = longest_first[begin : begin + batch]
        rows = [np.frombuffer(key, np.int32) for key in read]
        owners, asked = [], []
        for row, key in enumerate(read):
            for index, targets in readers[key]:
                owners.append(index)
                asked.append((row, targets))
        found = _score_batch(model, params, rows, asked, batch)
        for index, part in zip(owners, found, strict=True):
            whole = scores[index]
            scores[index] = Score(
                whole.log_prob + part.log_prob, whole.is_greedy and part.is_greedy
            )
            missing[index] -= 1
            if not missing[index]:
                yield index, scores[index]


def _score_batch(
    model: ModelFunctions,
    params: Params,
    rows: Sequence[np.ndarray],
    asked: Sequence[tuple[int, np.ndarray]],
    batch: int,
) -> list[Score]:
    """Scores targets after rows of inputs.

    Args:
      model, params: the model.
      rows: inputs, the longest first.
      asked: a row, and what follows its last inputs; a row may be asked repeatedly.
      batch: B, of which `rows` may be fewer.
    """
    padded = min(_bucket(len(rows[0])), model.config.trunk.max_length)
    tokens = np.zeros((batch, padded), np.int32)
    for row, inputs in enumerate(rows):
        tokens[row, : len(inputs)] = inputs
    lengths = [len(targets) for _, targets in asked]
    total = sum(lengths)
    # Padding asks for the first token of the first row, and is not looked at.
    places = np.zeros((3, _CHUNK << max(0, (total - 1) // _CHUNK).bit_length()))
    places = places.astype(np.int32)
    ends = np.cumsum(lengths)
    for (row, targets), end in zip(asked, ends, strict=True):
        length = len(rows[row])
        places[0, end - len(targets) : end] = row
        places[1, end - len(targets) : end] = np.arange(length - len(targets), length)
        places[2, end - len(targets) : end] = targets
    log_probs, greedy = jax.device_get(
        _score_targets(model, params, jnp.asarray(tokens), jnp.asarray(places))
    )
    # Sums of many float32 terms would lose digits.
    return [
        Score(
            float(log_probs[end - length : end].sum(dtype=np.float64)),
            bool(greedy[end - length : end].all()),
        )
        for length, end in zip(lengths, ends, strict=True)
    ]


def _bucket(length: int) -> int:
    """The next of 32, 48, 64, 96, 128, 192 …, so that few shapes are compiled."""
    power = max(1 << (length - 1).bit_length(), _SHORTEST)
    between = power * 3 // 4
    return between if _SHORTEST < length <= between else power


@functools.partial(jax.jit, static_argnames="model")
def _score_targets(
    model: ModelFunctions,
    params: Params,
    tokens: Int[Array, "B T"],
    places: Int[Array, "3 n"],
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """Log-probabilities of n targets, and whether each is the most likely token.

    Args:
      model, params: the model.
      tokens: what it reads, padded at the end.
      places: of each target the row, the position before it, and the target itself.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = causal_mask(jnp.ones_like(tokens))
    hidden, _ = model.forward(params, tokens, positions, mask)

    def score(chunk: Int[Array, "3 chunk"]) -> tuple[Array, Array]:
        row, position, target = chunk
        logits = model.next_token_logits(params, hidden[row, position])
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        found = jnp.take_along_axis(log_probs, target[:, None], axis=-1)[:, 0]
        return found, jnp.argmax(logits, axis=-1) == target

    chunks = places.reshape(3, -1, _CHUNK).swapaxes(0, 1)
    log_probs, greedy = jax.lax.map(score, chunks)
    return log_probs.reshape(-1), greedy.reshape(-1)
