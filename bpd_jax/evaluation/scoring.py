"""Log-probabilities of texts under a model, by teacher forcing in batches."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.base.compiled import padded_length
from bpd_jax.base.typing import Array, Bool, Float, Int
from bpd_jax.models.attention import Segments
from bpd_jax.models.model import Model
from bpd_jax.models.partitioning import even_rows, in_rows, on_host
from bpd_jax.models.programs import Program
from bpd_jax.models.transformer_config import check_token_ids

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


@functools.partial(Program, static=(), constants=("model",))
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
