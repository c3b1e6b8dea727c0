"""Will it pay? Predicted speed of every method, from what a pass costs here.

A serial call costs one pass of the model over M draft tokens and the drafting itself;
it yields as many tokens as replay says. So

    speed-up = block efficiency · seconds of a plain call / (seconds(M) + drafting)

where the seconds are measured on this device, with this model, at the batch size in
question, and the block efficiency on texts of the model's own. Whether drafting pays
depends on all three: on an accelerator a pass over 32 tokens takes hardly longer than
one over a single token until the batch is large; on a CPU it takes many times longer.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loop import look
from bpd_jax.decoding.methods import KINDS, Method, parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import Replay, record
from bpd_jax.decoding.state import DecodeState
from bpd_jax.errors import UserError
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.cache import KVCache, commit
from bpd_jax.typing import Params

# Draft tokens whose passes are timed; other sizes are interpolated.
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_REPEATS = 7

# A prediction is not exact: what gains less than this is not worth another method.
_MARGIN = 1.05


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
      block_efficiency: by replay.
      nodes: draft tokens of a pass, M.
      pass_seconds: of a pass over them.
      draft_seconds: of drafting, per serial call; None if it was not timed, because
        the method loses even if drafting costs nothing.
      speedup: over plain decoding; without `draft_seconds` an upper bound.
    """

    method: Method
    block_efficiency: float
    nodes: int
    pass_seconds: float
    draft_seconds: float | None
    speedup: float


def measure_passes(
    decoder: Decoder,
    batch_size: int,
    text_length: int,
    sizes: Sequence[int] = _SIZES,
) -> PassCosts:
    """Times passes of the model over `sizes` draft tokens after a text.

    Args:
      decoder: the model.
      batch_size: B.
      text_length: tokens in the cache.
      sizes: M.
    """
    model, params = decoder.model, decoder.params
    longest = max(sizes)

    @jax.jit
    def text() -> KVCache:
        tokens = jnp.ones((batch_size, text_length), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(text_length), tokens.shape)
        mask = causal_mask(jnp.ones_like(tokens))
        new = model.forward(params, tokens, positions, mask)[1]
        counts = jnp.full(batch_size, text_length)
        return commit(model.empty_cache(batch_size, text_length + longest), new, counts)

    cache = text()
    runs: dict[int, Callable[[], object]] = {}
    for size in sizes:

        @jax.jit
        def run(params: Params, cache: KVCache, size: int = size) -> jax.Array:
            tokens = jnp.ones((batch_size, size), jnp.int32)
            positions = text_length + jnp.broadcast_to(jnp.arange(size), tokens.shape)
            mask = causal_mask(jnp.ones_like(tokens))
            hidden, _ = model.forward(params, tokens, positions, mask, cache)
            return model.greedy_tokens(params, hidden)

        runs[size] = functools.partial(run, params, cache)
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
    """Seconds that drafting takes before one serial call."""
    options = DecodeOptions(max_new_tokens=1, batch_size=batch_size)
    reference = None
    if method.kind == "oracle":
        reference = decoder.decode(GREEDY, [prompt] * batch_size, options)
    task = decoder.task(method, options, reference)
    drafter, weights = task.drafter, task.weights
    state = task.prefill([prompt] * batch_size, range(batch_size), batch_size, 1)

    @jax.jit
    def draft_on_device(state: DecodeState) -> object:
        seen, memory, entropies = look(task.model, weights, drafter, state)
        return drafter.propose(seen, weights.drafter), memory, entropies

    look_at = jax.jit(look, static_argnames=("model", "drafter"))

    def draft_on_host() -> object:
        seen = look_at(task.model, weights, drafter, state)[0]
        return drafter.propose(jax.device_get(seen), None)

    on_device = functools.partial(draft_on_device, state)
    run = on_device if drafter.on_device else draft_on_host
    return _take_turns({0: run})[0]


def predict(
    decoder: Decoder,
    replay: Replay,
    methods: Sequence[Method],
    batch_size: int,
    *,
    on_progress: Callable[[Method], object] = lambda method: None,
) -> list[Prediction]:
    """What every method would gain over plain decoding, the best first.

    Args:
      decoder: the model, on the device in question.
      replay: texts that it decoded.
      methods: those to compare.
      batch_size: prompts decoded together.
      on_progress: called before each method.
    """
    prompt = replay.texts[0].input_ids
    lengths = [len(text.input_ids) + len(text.output_ids) for text in replay.texts]
    text_length = int(statistics.median(lengths))
    drafters = {method: decoder.drafter(method) for method in (GREEDY, *methods)}
    most = max(drafter.max_nodes for drafter in drafters.values())
    sizes = [size for size in _SIZES if size < 2 * most]
    costs = measure_passes(decoder, batch_size, text_length, sizes)
    replayer = replay.decoder(width=decoder.width, alpha=decoder.alpha)
    plain = costs.at(1)
    found = []
    for method, drafter in drafters.items():
        on_progress(method)
        texts = replay.decode(method, replayer)
        tokens = sum(len(text.output_ids) for text in texts)
        efficiency = tokens / max(sum(text.serial_calls for text in texts), 1)
        seconds = costs.at(drafter.max_nodes)
        drafting = None if method != GREEDY else 0.0
        if drafting is None and efficiency * plain / seconds > 1:
            drafting = measure_drafting(decoder, method, prompt, batch_size)
        found.append(
            Prediction(
                method=method,
                block_efficiency=efficiency,
                nodes=drafter.max_nodes,
                pass_seconds=seconds,
                draft_seconds=drafting,
                speedup=efficiency * plain / (seconds + (drafting or 0.0)),
            )
        )
    # What was not timed comes last: it loses, by how much nobody knows.
    return sorted(found, key=lambda p: (p.draft_seconds is None, -p.speedup))


def candidate_methods(decoder: Decoder) -> list[Method]:
    """What `auto` chooses from: all that the decoder can do, in several sizes."""
    names = ["prompt_lookup:4", "prompt_lookup:8"]
    block, width = decoder.model.block_size, decoder.width
    if block > 1:
        names += [f"bpd:heads={heads}" for heads in range(2, block, 2)] + ["bpd"]
        names += [f"zero_gram:{drafts}" for drafts in (4, 16)]
        names += [f"medusa:{nodes}" for nodes in (8, 16, 32, 64)]
        if decoder.assets.ngram is not None:
            for setting in ("", ":alpha=0.5", ":k=4"):
                names += [f"ngram:{drafts}{setting}" for drafts in (1, 4, 16)]
                names += [
                    f"medusa_ngram:{nodes}:search=best:adaptive=1{setting}"
                    for nodes in (8, 16, 32, 64)
                ]
        for kind in ("markov", "recurrent", "hydra"):
            if getattr(decoder.assets, kind) is not None:
                names += [f"{kind}:1", f"{kind}:4"]
        if decoder.assets.rescorer is not None:
            names.append("neural:1")
    if decoder.assets.draft_model is not None:
        names += ["draft_model:2", "draft_model:4"]
    methods = [parse_method(name) for name in names]

    def fits(method: Method) -> bool:
        """A lattice may have fewer paths, or candidates, than a method asks for."""
        drafts = method.count if "P" in KINDS[method.kind].size else 1
        narrower = method.k is None or method.k < width
        return narrower and drafts <= (method.k or width) ** (block - 1)

    return [method for method in methods if fits(method)]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `auto` chose, and from what.

    Attributes:
      method: the chosen one.
      predictions: all of them, the best first.
    """

    method: Method
    predictions: tuple[Prediction, ...]

    @classmethod
    def among(cls, predictions: Sequence[Prediction]) -> "Choice":
        """The fastest, unless what it gains is too little to be sure of."""
        best = predictions[0]
        pays = best.draft_seconds is not None and best.speedup > _MARGIN
        return cls(best.method if pays else GREEDY, tuple(predictions))

    def __str__(self) -> str:
        """One line for people."""
        best = next(p for p in self.predictions if p.method != GREEDY)
        timed = best.draft_seconds is not None
        drafting = f"{1e3 * (best.draft_seconds or 0.0):.2f} ms" if timed else "free"
        said = (
            f"{best.method.name}, predicted {'' if timed else 'at most '}"
            f"{best.speedup:.2f} times plain decoding (block efficiency "
            f"{best.block_efficiency:.2f}, a call over {best.nodes} tokens "
            f"{1e3 * best.pass_seconds:.2f} ms, drafting {drafting})"
        )
        if self.method == GREEDY:
            return f"greedy: drafting does not pay here; the best would be {said}."
        return said + "."


def choose_method(
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    *,
    methods: Sequence[Method] | None = None,
    on_progress: Callable[[Method], object] = lambda method: None,
) -> Choice:
    """Decodes a few prompts plainly, replays all methods, and takes the fastest.

    Args:
      decoder: the model.
      prompts: such as will be decoded; eight of them are looked at.
      options: with which they will be decoded.
      methods: to choose from; by default `candidate_methods`.
      on_progress: called before each method.

    Raises:
      UserError: there are no prompts.
    """
    if not prompts:
        raise UserError("--method=auto needs prompts to try methods on.")
    methods = candidate_methods(decoder) if methods is None else methods
    trial = dataclasses.replace(
        options,
        temperature=0.0,
        top_k=None,
        top_p=1.0,
        acceptance="exact",
        stop=(),
        max_new_tokens=min(options.max_new_tokens, 64),
    )
    sample = list(prompts[:8])
    texts = decoder.decode(GREEDY, sample, trial)
    keep_hidden = any(method.kind in ("hydra", "recurrent") for method in methods)
    width = max([decoder.width, *(method.k or 1 for method in methods)])
    replay = record(decoder, texts, trial, width=width, keep_hidden=keep_hidden)
    batch_size = min(options.batch_size, len(prompts))
    predictions = predict(decoder, replay, methods, batch_size, on_progress=on_progress)
    return Choice.among(predictions)


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
