"""Predicted speed-up of drafting methods, and the choice of the fastest one.

A serial call consists of drafting and a pass of the model over draft tokens. Replay
gives the calls of every text, and the size of the draft of every call. A batch ends
with its slowest row, and a pass has the size of the largest draft in the batch, so

    speed-up = calls of the slowest row (plain) · seconds of a plain call
             / Σ_calls of the slowest row (seconds of a pass + seconds of drafting)

with sums over batches. The seconds are measured on this device, with this model and
batch size, the calls on texts that the model decoded. Passes over many tokens cost
little more than plain passes on an accelerator with small batches, and much more on a
CPU.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.aliases import (
    ALIASES,
    bpd,
    draft_model,
    medusa,
    neural,
    ngram,
    oracle,
    prompt_lookup,
    zero_gram,
)
from bpd_jax.decoding.call_costs import (
    SIZES,
    measure_drafting,
    measure_passes,
    sizes_of_passes,
)
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import Replay, check_replayable, record
from bpd_jax.decoding.verification import pass_sizes
from bpd_jax.drafting.assets import REFINERS
from bpd_jax.drafting.parts import SearchPart
from bpd_jax.drafting.searches.beam_search import Greedy
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.drafting.sources.block import Block
from bpd_jax.drafting.sources.lookup import Lookup
from bpd_jax.models.model import Model

# Predictions are not exact: drafting is chosen only above this speed-up.
_MARGIN = 1.05

# Lowest number of texts that `choose_method` decodes, and highest number of tokens.
_TRIAL_TEXTS, _TRIAL_TOKENS = 8, 64


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted speed-up of a method.

    Attributes:
      block_efficiency: decoded tokens per serial call of a row, by replay.
      nodes: draft tokens of a pass, on average.
      pass_seconds: seconds of a pass, on average.
      draft_seconds: seconds of drafting per serial call; None if it was not timed,
        because the method is slower than plain decoding even without them.
      speedup: speed-up over plain decoding; an upper bound without `draft_seconds`.
      replayed: whether the method was replayed. Otherwise the numbers are those of the
        oracle with the smallest pass of the method, which is slower than another one.
    """

    method: Method
    block_efficiency: float
    nodes: float
    pass_seconds: float
    draft_seconds: float | None
    speedup: float
    replayed: bool = True


def predict(
    decoder: Decoder,
    replay: Replay,
    methods: Sequence[Method],
    batch_sizes: Sequence[int],
    *,
    on_progress: Callable[[Method], object] = lambda method: None,
) -> dict[int, list[Prediction]]:
    """Predicts the speed-up of methods over plain decoding.

    Every method is replayed once for all batch sizes, unless it cannot be the fastest.
    Methods that are likely to be fast should therefore come first.

    Args:
      replay: decoded texts, in the order of their batches. Fewer texts than rows are
        treated as one batch, which underestimates the calls of its slowest row.

    Returns:
      Predictions by batch size, the fastest first.
    """
    prompt = replay.texts[0].input_ids
    lengths = [len(text.input_ids) + len(text.output_ids) for text in replay.texts]
    drafters = {method: decoder.drafter(method) for method in (GREEDY, *methods)}
    sizes = {
        method: pass_sizes(drafter, replay.options.verification)
        for method, drafter in drafters.items()
    }
    most = max(of_method[-1] for of_method in sizes.values())
    timed = [size for size in SIZES if size < 2 * most]
    rows = {b: decoder.task(GREEDY, DecodeOptions()).rows(b) for b in batch_sizes}
    costs = {
        b: measure_passes(decoder, rows[b], int(statistics.median(lengths)), timed)
        for b in batch_sizes
    }
    replayer = replay.decoder(width=decoder.width, alpha=decoder.alpha)
    plain_nodes = [np.ones(len(text.output_ids), np.int32) for text in replay.texts]

    def nodes_of(method: Method) -> list[np.ndarray]:
        return [text.nodes for text in replay.decode(method, replayer)]

    def passes(b: int, method: Method, nodes: Sequence[np.ndarray]) -> np.ndarray:
        return sizes_of_passes(nodes, rows[b], sizes[method])

    def speedup(
        b: int, method: Method, nodes: Sequence[np.ndarray], drafting: float
    ) -> float:
        plain = len(passes(b, GREEDY, plain_nodes)) * costs[b].at(1)
        of_method = passes(b, method, nodes)
        return plain / (costs[b].total(of_method) + drafting * len(of_method))

    # The oracle's calls bound those of methods within its lattice, that of the heads.
    # The bound is not strict: rarely, a shorter draft leads to a position with better
    # heads.
    bounded = [m for m in methods if m.within_lattice and m.source.name == "heads"]
    bound: list[np.ndarray] = []
    if bounded:
        widest = max(method.setting("k") or decoder.width for method in bounded)
        # Every call is counted with the smallest pass.
        bound = [np.ones_like(nodes) for nodes in nodes_of(oracle(k=widest))]
    best = dict.fromkeys(batch_sizes, 1.0)
    predictions: dict[int, list[Prediction]] = {b: [] for b in batch_sizes}
    for method in drafters:
        on_progress(method)
        replayed = method not in bounded or any(
            speedup(b, method, bound, 0.0) >= best[b] for b in batch_sizes
        )
        nodes = bound
        if replayed:
            nodes = plain_nodes if method == GREEDY else nodes_of(method)
        for b in batch_sizes:
            drafting = 0.0 if method == GREEDY else None
            if drafting is None and replayed and speedup(b, method, nodes, 0.0) > 1:
                drafting = measure_drafting(decoder, method, prompt, b)
            gain = speedup(b, method, nodes, drafting or 0.0)
            of_method = passes(b, method, nodes)
            if drafting is not None and not method.is_oracle:
                best[b] = max(best[b], gain)
            predictions[b].append(
                Prediction(
                    method=method,
                    block_efficiency=sum(map(len, plain_nodes)) / sum(map(len, nodes)),
                    nodes=float(np.mean(of_method)),
                    pass_seconds=costs[b].total(of_method) / len(of_method),
                    draft_seconds=drafting,
                    speedup=gain,
                    replayed=replayed,
                )
            )

    def order(p: Prediction) -> tuple[bool, bool, float]:
        """Upper bounds come after predictions."""
        return not p.replayed, p.draft_seconds is None, -p.speedup

    return {b: sorted(listed, key=order) for b, listed in predictions.items()}


def candidate_methods(
    decoder: Decoder,
    prompts: Sequence[np.ndarray] = (),
    options: DecodeOptions | None = None,
) -> list[Method]:
    """The methods that `auto` compares, those that are likely to be fast first.

    Args:
      options: options of decoding; small LMs must have room for such texts.
    """
    methods = [prompt_lookup(4), prompt_lookup(8)]
    block, width = decoder.model.block_size, decoder.width
    length = max(map(len, prompts), default=0)
    length += options.max_new_tokens if options else 0

    def is_usable(small: Model | None) -> bool:
        """Whether there is a small LM with room for the texts."""
        return small is not None and small.config.trunk.max_length >= length

    if block > 1:
        methods += [bpd(), zero_gram(4), medusa(8), medusa(32)]
        if block > 2:
            methods.append(bpd(heads=max(block // 2, 2)))
        if decoder.assets.ngram is not None:
            for alpha in (None, 0.5):
                methods += [ngram(drafts, alpha=alpha) for drafts in (1, 4, 16)]
                tree: dict[str, Any] = {"search": "best", "adaptive": 1, "alpha": alpha}
                methods += [ngram(16, **tree), ngram(32, **tree)]
            methods += [ngram(4, k=4), ngram(1, alpha=0.5, slope=0.1)]
        for kind in REFINERS:
            if getattr(decoder.assets, kind) is not None:
                methods += [ALIASES[kind](1), ALIASES[kind](4)]
        if is_usable(decoder.assets.rescorer):
            methods.append(neural(1))
    if decoder.assets.drafter is not None:
        methods.append(decoder.default_method)
        ends: list[tuple[SearchPart, Lookup | None]] = [
            *((Greedy(), None), (Tree(8), None)),
            *((Tree(16, min_prob=0.05), None), (Tree(32, min_prob=0.05), None)),
            *((Tree(8), Lookup(4)), (Tree(8), Lookup(8))),
            (Tree(16, min_prob=0.05), Lookup(8)),
        ]
        for drafter in dict.fromkeys(((Block(), ()), decoder.refined_block)):
            methods += [Method(*drafter, *end) for end in ends]
    if is_usable(decoder.assets.draft_model):
        methods += [draft_model(2), draft_model(4)]

    def fits(method: Method) -> bool:
        """Whether the lattice has enough candidates and paths for a method."""
        k = method.setting("k")
        drafts = 1 if method.search is None else method.search.drafts
        return (k is None or k < width) and drafts <= (k or width) ** (block - 1)

    return [method for method in methods if fits(method)]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of `auto`.

    Attributes:
      method: the chosen method.
      predictions: predictions of all methods, the fastest first.
      note: an additional sentence for the reader, or "".
    """

    method: Method
    predictions: tuple[Prediction, ...]
    note: str = ""

    @classmethod
    def among(cls, predictions: Sequence[Prediction], note: str = "") -> "Choice":
        """Chooses the fastest method, or greedy if its speed-up is too small."""
        greedy = cls(GREEDY, tuple(predictions), note)
        best = greedy._best
        if best is None or best.draft_seconds is None or best.speedup <= _MARGIN:
            return greedy
        return dataclasses.replace(greedy, method=best.method)

    @property
    def _best(self) -> Prediction | None:
        """The fastest method except plain decoding and the oracle."""
        methods = (p for p in self.predictions if not p.method.is_oracle)
        return next((p for p in methods if p.method != GREEDY), None)

    def __str__(self) -> str:
        """One line with the choice and its reason."""
        note = f" {self.note}" if self.note else ""
        best = self._best
        if best is None:
            return f"greedy: there is no other method to choose from.{note}"
        timed = best.draft_seconds is not None
        drafting = f"{1e3 * (best.draft_seconds or 0.0):.2f} ms" if timed else "free"
        description = (
            f"{best.method.name}, predicted {'' if timed else 'at most '}"
            f"{best.speedup:.2f} times plain decoding (block efficiency "
            f"{'' if best.replayed else 'at most '}{best.block_efficiency:.2f}, a call "
            f"over {best.nodes:.0f} tokens {1e3 * best.pass_seconds:.2f} ms, drafting "
            f"{drafting})"
        )
        if self.method == GREEDY:
            description = f"greedy: no method is predicted to be faster; {description}"
        return f"{description}.{note}"


def choose_method(
    decoder: Decoder,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    *,
    methods: Sequence[Method] | None = None,
    on_progress: Callable[[Method], object] = lambda method: None,
) -> Choice:
    """Predicts the speed-up of methods on some of the prompts and chooses the fastest.

    Args:
      prompts: prompts to decode; the first batch, or at least eight, are decoded with
        plain greedy decoding and replayed.
      options: options of decoding; predictions are for greedy decoding.
      methods: methods to choose from; by default `candidate_methods`.
    """
    if not prompts:
        raise UserError("--method=auto needs prompts to compare methods on.")
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
    sizes = [batch_size]
    predictions = predict(decoder, replay, methods, sizes, on_progress=on_progress)
    note = "Predicted for greedy decoding." if options.temperature else ""
    return Choice.among(predictions[batch_size], note)


def check_methods(
    decoder: Decoder,
    methods: Sequence[Method],
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
) -> None:
    """Refuses methods whose speed-up cannot be predicted."""
    for method in methods:
        check_replayable(method)
        decoder.drafter(method)
        decoder.check(method, prompts, options)


def tuned_choice(
    path: str, facts: Mapping[str, Any], device: str, batch_size: int
) -> Method | None:
    """The choice of `bpd_jax.tune` for a batch size on a device; None if there is none.

    Args:
      path: path of `drafting.json`, for messages.
      device: description of the device; see `provenance.device`.
    """
    try:
        name = facts["choices"].get(str(batch_size))
        if name is None or facts["device"] != device:
            return None
        return parse_method(name)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} has no valid choices of methods: {error}; run bpd_jax.tune again."
        ) from error
