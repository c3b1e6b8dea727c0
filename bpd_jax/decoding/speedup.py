"""Will it pay? Predicted speed of every method, from what a pass costs here.

A serial call costs one pass of the model over M draft tokens and the drafting itself;
how many calls a text takes, replay says. A batch is done when its slowest row is, so

    speed-up = Σ calls of the slowest row, plain · seconds of a plain call
             / Σ calls of the slowest row · (seconds(M) + drafting)

with sums over batches, where the seconds are measured on this device, with this model,
at the batch size in question, and the calls on texts of the model's own. With one row
this is block efficiency times the ratio of the seconds. Whether drafting pays depends
on all of them: on an accelerator a pass over 32 tokens takes hardly longer than one
over a single token until the batch is large; on a CPU it takes many times longer.
"""

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax import files
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loop import Weights, look
from bpd_jax.decoding.methods import Method, parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import Replay, check_replayable, record
from bpd_jax.decoding.state import DecodeState
from bpd_jax.decoding.verification import laid_out
from bpd_jax.drafting.assets import SmallModel
from bpd_jax.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import KVCache
from bpd_jax.typing import Params

# Draft tokens whose passes are timed; other sizes are interpolated.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 7

# A prediction is not exact: what gains less than this is not worth another method.
_MARGIN = 1.05

# Texts that `choose_method` looks at, at least, and new tokens of each, at most.
_TRIAL_TEXTS, _TRIAL_TOKENS = 8, 64


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """Seconds of one forward pass over M draft tokens in each of B rows.

    Attributes:
      batch_size: B.
      seconds: by M, increasing in M.
    """

    batch_size: int
    seconds: dict[int, float]

    def at(self, nodes: int) -> float:
        """Seconds over `nodes` tokens: linear between and beyond what was measured."""
        sizes = sorted(self.seconds)
        if nodes in self.seconds or len(sizes) == 1:
            return self.seconds.get(nodes, self.seconds[sizes[0]])
        above = max(min(int(np.searchsorted(sizes, nodes)), len(sizes) - 1), 1)
        low, high = sizes[above - 1], sizes[above]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (nodes - low)


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a method is expected to gain.

    Attributes:
      method: the method.
      block_efficiency: decoded tokens per serial call of a row, by replay.
      nodes: draft tokens that a pass lays out, M.
      pass_seconds: of a pass over them.
      draft_seconds: of drafting, per serial call; None if it was not timed, because
        the method loses even if drafting costs nothing.
      speedup: over plain decoding; without `draft_seconds` an upper bound.
      tried: whether it was replayed. If not, even the oracle with passes over as many
        tokens is slower than another method; numbers are the oracle's, as bounds.
    """

    method: Method
    block_efficiency: float
    nodes: int
    pass_seconds: float
    draft_seconds: float | None
    speedup: float
    tried: bool = True


def measure_passes(
    decoder: Decoder,
    batch_size: int,
    text_length: int,
    sizes: Sequence[int] = _SIZES,
) -> PassCosts:
    """Times passes of the model over `sizes` draft tokens after a text.

    Args:
      decoder: the model.
      batch_size: B; with a mesh as `Task.rows` gives it.
      text_length: tokens in the cache.
      sizes: M.
    """
    model = decoder.model
    task = decoder.task(GREEDY, DecodeOptions(max_new_tokens=max(sizes)))
    text = [np.ones(text_length, np.int32)] * batch_size
    cache = task.prefill(text, range(batch_size), batch_size, 1).cache
    runs: dict[int, Callable[[], object]] = {}
    for size in sizes:

        @jax.jit
        def run(params: Params, cache: KVCache, size: int = size) -> jax.Array:
            tokens = jnp.ones((batch_size, size), jnp.int32)
            positions = text_length + jnp.broadcast_to(jnp.arange(size), tokens.shape)
            mask = causal_mask(jnp.ones_like(tokens))
            hidden, _ = model.forward(params, tokens, positions, mask, cache)
            return model.greedy_tokens(params, hidden)

        runs[size] = functools.partial(run, decoder.params, cache)
    times = _take_turns(runs)
    # A pass over more tokens is never cheaper: what seems so is noise.
    seconds, most = {}, 0.0
    for size in sorted(sizes):
        most = max(most, times[size])
        seconds[size] = most
    return PassCosts(batch_size, seconds)


def measure_drafting(
    decoder: Decoder, method: Method, prompt: np.ndarray, batch_size: int
) -> float:
    """Seconds that drafting takes before one serial call of `batch_size` rows."""
    options = DecodeOptions(max_new_tokens=1, batch_size=batch_size)
    prompts, reference = [prompt] * batch_size, None
    if method.is_oracle:
        reference = decoder.decode(GREEDY, prompts, options)
    task = decoder.task(method, options, reference)
    drafter = task.drafter
    rows = task.rows(batch_size)
    state = task.prefill(prompts, range(batch_size), rows, 1)

    @jax.jit
    def draft_on_device(weights: Weights, state: DecodeState) -> object:
        seen, memory, entropies = look(task.model, weights, drafter, state)
        return drafter.propose(seen, weights.drafter), memory, entropies

    look_at = jax.jit(look, static_argnames=("model", "drafter"))

    def draft_on_host(weights: Weights, state: DecodeState) -> object:
        seen = look_at(task.model, weights, drafter, state)[0]
        return drafter.propose(jax.device_get(seen), None)

    draft = draft_on_device if drafter.on_device else draft_on_host
    return _take_turns({0: functools.partial(draft, task.weights, state)})[0]


def predict(
    decoder: Decoder,
    replay: Replay,
    methods: Sequence[Method],
    batch_sizes: Sequence[int],
    *,
    on_progress: Callable[[Method], object] = lambda method: None,
) -> dict[int, list[Prediction]]:
    """What every method would gain over plain decoding, the best first.

    Each method is replayed once for all batch sizes, or not at all where it cannot be
    the fastest. So methods that are likely to be fast should come first.

    Args:
      decoder: the model, on the device in question.
      replay: texts that it decoded, in the order of their batches; where they are
        fewer than a batch, they count as one, whose slowest row is rather fast.
      methods: those to compare.
      batch_sizes: numbers of prompts decoded together.
      on_progress: called before each method.

    Returns:
      Predictions by batch size.
    """
    prompt = replay.texts[0].input_ids
    lengths = [len(text.input_ids) + len(text.output_ids) for text in replay.texts]
    drafters = {method: decoder.drafter(method) for method in (GREEDY, *methods)}
    nodes = {
        method: laid_out(drafter, replay.options.verification)
        for method, drafter in drafters.items()
    }
    timed = [size for size in _SIZES if size < 2 * max(nodes.values())]
    rows = {b: decoder.task(GREEDY, DecodeOptions()).rows(b) for b in batch_sizes}
    costs = {
        b: measure_passes(decoder, rows[b], int(statistics.median(lengths)), timed)
        for b in batch_sizes
    }
    replayer = replay.decoder(width=decoder.width, alpha=decoder.alpha)
    plain_calls = [len(text.output_ids) for text in replay.texts]

    def replayed(method: Method) -> list[int]:
        return [text.serial_calls for text in replay.decode(method, replayer)]

    def speedup(b: int, method: Method, calls: list[int], drafting: float) -> float:
        plain = _turns(plain_calls, rows[b]) * costs[b].at(1)
        seconds = costs[b].at(nodes[method]) + drafting
        return plain / (_turns(calls, rows[b]) * seconds)

    bounded = [method for method in methods if _within_lattice(method)]
    bound: list[int] = []
    if bounded:
        widest = max(method.setting("k") or decoder.width for method in bounded)
        bound = replayed(parse_method(f"oracle:k={widest}"))
    best = dict.fromkeys(batch_sizes, 1.0)
    found: dict[int, list[Prediction]] = {b: [] for b in batch_sizes}
    for method in drafters:
        on_progress(method)
        tried = method not in bounded or any(
            speedup(b, method, bound, 0.0) >= best[b] for b in batch_sizes
        )
        calls = bound
        if tried:
            calls = plain_calls if method == GREEDY else replayed(method)
        for b in batch_sizes:
            drafting = 0.0 if method == GREEDY else None
            if drafting is None and tried and speedup(b, method, calls, 0.0) > 1:
                drafting = measure_drafting(decoder, method, prompt, b)
            gain = speedup(b, method, calls, drafting or 0.0)
            if drafting is not None and not method.is_oracle:
                best[b] = max(best[b], gain)
            found[b].append(
                Prediction(
                    method=method,
                    block_efficiency=sum(plain_calls) / sum(calls),
                    nodes=nodes[method],
                    pass_seconds=costs[b].at(nodes[method]),
                    draft_seconds=drafting,
                    speedup=gain,
                    tried=tried,
                )
            )

    def order(p: Prediction) -> tuple[bool, bool, float]:
        """What was not timed or tried comes last: it loses, how much nobody knows."""
        return not p.tried, p.draft_seconds is None, -p.speedup

    return {b: sorted(predictions, key=order) for b, predictions in found.items()}


def _turns(calls: Sequence[int], rows: int) -> int:
    """Serial calls of the slowest row of every batch, summed.

    Worked example: calls 5, 3, 4 in batches of two take 5 + 4 turns.
    """
    return sum(max(calls[i : i + rows]) for i in range(0, len(calls), rows))


def _within_lattice(method: Method) -> bool:
    """Whether all its drafts are paths of the heads' lattice, as the oracle's are.

    Then the oracle's calls are a bound. (Not a strict one: where heads far from the
    end are wrong, shorter drafts may happen to end at better places; this is rare.)
    """
    return method.within_lattice and not method.is_oracle


def candidate_methods(
    decoder: Decoder,
    prompts: Sequence[np.ndarray] = (),
    options: DecodeOptions | None = None,
) -> list[Method]:
    """What `auto` chooses from: few of each kind, those likely to be fast first.

    Args:
      decoder: whose assets say what can be done.
      prompts: such as will be decoded.
      options: with which; a small LM must hold texts of that length.
    """
    names = ["prompt_lookup:4", "prompt_lookup:8"]
    block, width = decoder.model.block_size, decoder.width
    length = max(map(len, prompts), default=0)
    length += options.max_new_tokens if options else 0

    def holds(small: SmallModel | None) -> bool:
        """Whether there is a small LM that can read whole texts."""
        if small is None:
            return False
        return bool(small.functions.config.trunk.max_length >= length)

    if block > 1:
        names += ["bpd", "zero_gram:4", "medusa:8", "medusa:32"]
        if block > 2:
            names.append(f"bpd:heads={max(block // 2, 2)}")
        if decoder.assets.ngram is not None:
            for setting in ("", ":alpha=0.5"):
                names += [f"ngram:{drafts}{setting}" for drafts in (1, 4, 16)]
                names += [
                    f"ngram:{nodes}:search=best:adaptive=1{setting}"
                    for nodes in (16, 32)
                ]
            names += ["ngram:4:k=4", "ngram:1:alpha=0.5:slope=0.1"]
        for kind in ("markov", "recurrent", "hydra"):
            if getattr(decoder.assets, kind) is not None:
                names += [f"{kind}:1", f"{kind}:4"]
        if holds(decoder.assets.rescorer):
            names.append("neural:1")
    if decoder.assets.drafter is not None:
        refined = "+ngram" if decoder.assets.ngram is not None else ""
        for source in dict.fromkeys(("block", f"block{refined}")):
            names += [f"{source}/greedy", f"{source}/tree:8"]
            names += [f"{source}/tree:{nodes}:min_prob=0.05" for nodes in (16, 32)]
            names.append(f"{source}/tree:16:min_prob=0.05+lookup:8")
    if holds(decoder.assets.draft_model):
        names += ["draft_model:2", "draft_model:4"]

    def fits(method: Method) -> bool:
        """A lattice may have fewer paths, or candidates, than a method asks for."""
        k = method.setting("k")
        drafts = 1 if method.search is None else method.search.drafts
        return (k is None or k < width) and drafts <= (k or width) ** (block - 1)

    return [method for method in map(parse_method, names) if fits(method)]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `auto` chose, and from what.

    Attributes:
      method: the chosen one.
      predictions: all of them, the best first.
      note: what else there is to know, a sentence or nothing.
    """

    method: Method
    predictions: tuple[Prediction, ...]
    note: str = ""

    @classmethod
    def among(cls, predictions: Sequence[Prediction], note: str = "") -> "Choice":
        """The fastest, unless what it gains is too little to be sure of."""
        found = cls(GREEDY, tuple(predictions), note)
        best = found._best
        if best is None or best.draft_seconds is None or best.speedup <= _MARGIN:
            return found
        return dataclasses.replace(found, method=best.method)

    @property
    def _best(self) -> Prediction | None:
        """The fastest besides plain decoding and the oracle, which is but a bound."""
        return next(
            (
                p
                for p in self.predictions
                if p.method != GREEDY and not p.method.is_oracle
            ),
            None,
        )

    def __str__(self) -> str:
        """One line for people."""
        note = f" {self.note}" if self.note else ""
        best = self._best
        if best is None:
            return f"greedy: there was no other method to choose from.{note}"
        timed = best.draft_seconds is not None
        drafting = f"{1e3 * (best.draft_seconds or 0.0):.2f} ms" if timed else "free"
        said = (
            f"{best.method.name}, predicted {'' if timed else 'at most '}"
            f"{best.speedup:.2f} times plain decoding (block efficiency "
            f"{'' if best.tried else 'at most '}{best.block_efficiency:.2f}, a call "
            f"over {best.nodes} tokens {1e3 * best.pass_seconds:.2f} ms, drafting "
            f"{drafting})"
        )
        if self.method == GREEDY:
            said = f"greedy: drafting does not pay here; the best would be {said}"
        return f"{said}.{note}"


def choose_method(
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    *,
    methods: Sequence[Method] | None = None,
    on_progress: Callable[[Method], object] = lambda method: None,
) -> Choice:
    """Decodes a few prompts plainly, replays methods on them, and takes the fastest.

    Args:
      decoder: the model.
      prompts: such as will be decoded; a batch of them, at least eight, is looked at.
      options: with which they will be decoded; predictions are for greedy decoding.
      methods: to choose from; by default `candidate_methods`.
      on_progress: called before each method.

    Raises:
      UserError: there are no prompts, or a method cannot decode or replay them.
    """
    if not prompts:
        raise UserError("--method=auto needs prompts to try methods on.")
    if methods is None:
        methods = candidate_methods(decoder, prompts, options)
    check_methods(decoder, methods, prompts, options)
    trial = dataclasses.replace(
        options,
        temperature=0.0,
        top_k=None,
        top_p=1.0,
        acceptance="exact",
        max_new_tokens=min(options.max_new_tokens, _TRIAL_TOKENS),
    )
    batch_size = min(options.batch_size, len(prompts))
    sample = list(prompts[: max(batch_size, _TRIAL_TEXTS)])
    texts = decoder.decode(GREEDY, sample, trial)
    keep_hidden = any(method.needs_hidden for method in methods)
    width = max([decoder.width, *(method.setting("k") or 1 for method in methods)])
    replay = record(decoder, texts, trial, width=width, keep_hidden=keep_hidden)
    found = predict(decoder, replay, methods, [batch_size], on_progress=on_progress)
    note = "Predicted for greedy decoding." if options.temperature else ""
    return Choice.among(found[batch_size], note)


def check_methods(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
) -> None:
    """Raises a `UserError` for a method whose gain cannot be predicted."""
    for method in methods:
        check_replayable(method)
        decoder.drafter(method)
        decoder.check(method, prompts, options)


def tuned_choice(
    path: str | os.PathLike[str], device: str, batch_size: int
) -> Method | None:
    """What `bpd_jax.tune` chose for a batch size; None if it did not, or not here.

    Args:
      path: what it wrote, `drafting.json` of a run folder.
      device: description of this device; see `provenance.device`.
      batch_size: prompts decoded together.

    Raises:
      UserError: the file is damaged.
    """
    try:
        facts = files.read_json(path)
        name = facts["choices"].get(str(batch_size))
        if name is None or facts["device"] != device:
            return None
        return parse_method(name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} does not hold choices of methods: {error}; run bpd_jax.tune again."
        ) from error


def _take_turns(runs: dict[int, Callable[[], object]]) -> dict[int, float]:
    """Median seconds of each; they take turns, so that noise meets all alike."""
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[int, list[float]] = {key: [] for key in runs}
    for _ in range(_REPEATS):
        for key, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}
