"""Single blocks looked at closely: the lattice and what each method drafts from it."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.drafting.drafters.blockwise import BlockwiseDrafter
from bpd_jax.drafting.interface import BoundModel
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.evaluation.compare import MethodResult
from bpd_jax.models.attention import causal_mask


@dataclasses.dataclass(frozen=True)
class BlockPath:
    """A draft of a block.

    Attributes:
      label: the method.
      candidates: per position the index of its token in the lattice.
      accepted: leading tokens that greedy decoding emits.
    """

    label: str
    candidates: list[int]
    accepted: int


@dataclasses.dataclass(frozen=True)
class BlockView:
    """The lattice after some text, with drafts.

    Attributes:
      text: token ids before the block.
      tokens, log_probs: the lattice, `[L, W]`.
      greedy: the L tokens that greedy decoding emits.
      paths: one per method that is drawn.
    """

    text: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray
    greedy: np.ndarray
    paths: list[BlockPath]


def telling_block(
    decoder: Decoder, results: Sequence[MethodResult], max_prompts: int = 8
) -> BlockView | None:
    """The block in which refinement gained most over BPD.

    Looks at every serial call of BPD on the first `max_prompts` prompts.

    Returns:
      None if there is no result for BPD or no text is long enough.
    """
    kinds = {result.method.kind: result for result in results}
    if "bpd" not in kinds:
        return None
    refined = kinds.get("ngram") or kinds.get("zero_gram") or kinds["bpd"]
    size = decoder.model.block_size
    best: BlockView | None = None
    for generation in kinds["bpd"].generations[:max_prompts]:
        text = np.concatenate([generation.input_ids, generation.output_ids])
        ends = len(generation.input_ids) + np.concatenate(
            [[0], np.cumsum(generation.accepted)[:-1]]
        )
        ends = ends[ends + size <= len(text)]
        if not len(ends):
            continue
        lattice = _lattices(decoder, text, ends)
        for row, end in enumerate(ends):
            view = _view(decoder, lattice, row, text, int(end), refined)
            if best is None or _gain(view) > _gain(best):
                best = view
    return best


def _lattices(decoder: Decoder, text: np.ndarray, ends: np.ndarray) -> Lattice:
    """The lattices after `text[:end]` for every end, from one forward pass."""
    tokens = jnp.asarray(text)[None]
    hidden, _ = decoder.model.forward(
        decoder.params,
        tokens,
        jnp.arange(len(text))[None],
        causal_mask(jnp.ones_like(tokens)),
    )
    return BoundModel(decoder.model, decoder.params).lattice(
        hidden[0, ends - 1],
        jnp.asarray(text[ends]),
        decoder.model.block_size,
        decoder.width,
    )


def _view(
    decoder: Decoder,
    lattice: Lattice,
    row: int,
    text: np.ndarray,
    end: int,
    refined: MethodResult,
) -> BlockView:
    tokens, log_probs = (
        np.asarray(lattice.tokens[row]),
        np.asarray(lattice.log_probs[row]),
    )
    greedy = text[end : end + len(tokens)]
    paths = [_path("BPD", tokens, tokens[:, 0], greedy)]
    drafter = decoder.drafter(refined.method)
    if refined.method.kind != "bpd" and isinstance(drafter, BlockwiseDrafter):
        length = drafter.rescorer.context_length
        context = np.full((1, length), -1, np.int32)
        recent = text[max(0, end - length) : end]
        context[0, length - len(recent) :] = recent
        one = jax.tree.map(lambda array: array[row : row + 1], lattice)
        drafts = drafter.rescorer.refine(one, context, drafter.rescorer.arrays)
        usable = np.isfinite(np.asarray(drafts.scores)[0])
        candidates = [
            _path(refined.label, tokens, draft, greedy)
            for draft in np.asarray(drafts.tokens)[0][usable]
        ]
        paths.append(max(candidates, key=lambda path: path.accepted))
    held = (tokens == greedy[:, None]).any(1)
    oracle = np.where(held, greedy, tokens[:, 0])
    paths.append(_path("Oracle", tokens, oracle, greedy))
    return BlockView(text[:end], tokens, log_probs, greedy, paths)


def _path(
    label: str, tokens: np.ndarray, draft: np.ndarray, greedy: np.ndarray
) -> BlockPath:
    candidates = np.argmax(tokens == draft[:, None], axis=1).tolist()
    accepted = int(np.cumprod(draft == greedy).sum())
    return BlockPath(label, candidates, accepted)


def _gain(view: BlockView) -> tuple[int, int]:
    """How much the refined draft gained, then how long it was."""
    refined = view.paths[-2]
    return refined.accepted - view.paths[0].accepted, refined.accepted
