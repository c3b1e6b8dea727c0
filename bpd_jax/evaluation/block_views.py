"""A single block in detail: its lattice and the drafts of several methods."""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.compare import MethodResult
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.decoding.replay import Replay, record
from bpd_jax.drafting.lattice import Lattice, build_lattice


@dataclasses.dataclass(frozen=True)
class BlockPath:
    """A draft of a block.

    Attributes:
      label: display name of the method.
      candidates: for each position, the index of the draft token in the lattice.
      accepted: number of leading tokens that greedy decoding emits.
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
      greedy: the tokens that greedy decoding emits, `[L]`; -1 after the text's end.
      paths: one per method.
    """

    text: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray
    greedy: np.ndarray
    paths: list[BlockPath]

    @property
    def gain(self) -> tuple[int, int]:
        """Tokens that the refined draft gains over BPD, then its accepted tokens."""
        refined = self.paths[-2]
        return refined.accepted - self.paths[0].accepted, refined.accepted


def view_block(
    text: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    greedy: np.ndarray,
    refined: Mapping[str, np.ndarray],
) -> BlockView:
    """A block with the drafts of BPD, of refined methods and of the oracle."""
    is_candidate = (tokens == greedy[:, None]).any(1)
    oracle = np.where(is_candidate, greedy, tokens[:, 0])
    drafts = {"BPD": tokens[:, 0], **refined, "Oracle": oracle}
    paths = []
    for label, draft in drafts.items():
        # A path through the lattice ends before the first token outside of it.
        matches = tokens[: len(draft)] == draft[: len(tokens), None]
        length = int(np.cumprod(matches.any(1)).sum())
        accepted = int(np.cumprod(draft[:length] == greedy[:length]).sum())
        candidates = np.argmax(matches[:length], axis=1).tolist()
        paths.append(BlockPath(label, candidates, accepted))
    return BlockView(text, tokens, log_probs, greedy, paths)


def most_improved_block(
    decoder: Decoder, results: Sequence[MethodResult], max_prompts: int = 8
) -> BlockView | None:
    """The block in which refinement gained most over BPD.

    Considers every serial call of BPD on the first `max_prompts` prompts: the texts are
    recorded, and the refined method drafts from the recording (see `Replay`).

    Returns:
      None if there is no result for BPD with all heads or no text is long enough.
    """
    bpd = next((r for r in results if r.method.name == "bpd"), None)
    if bpd is None:
        return None
    kinds = {result.method.kind: result for result in results}
    refined = kinds.get("heads+ngram/best") or kinds.get("heads/best") or bpd
    size = decoder.model.block_size
    texts, ends = [], []
    for text in bpd.generations[:max_prompts]:
        length = len(text.input_ids)
        starts = length + np.concatenate([[0], np.cumsum(text.accepted)[:-1]])
        starts = starts[starts + size <= length + len(text.output_ids)]
        if len(starts):
            texts.append(text)
            ends.append(starts)
    if not texts:
        return None
    options = DecodeOptions(max_new_tokens=size)
    width = refined.method.setting("k") or decoder.width
    replay = record(decoder, texts, options, width=width)
    # A text with fewer calls than others repeats its last one.
    most = max(map(len, ends))
    calls = np.stack([np.pad(e, (0, most - len(e)), mode="edge") for e in ends], axis=1)
    drafts = None
    if refined is not bpd:
        drafts = _drafts(decoder, replay, refined, calls)
    views = []
    tokens = np.asarray(replay.model.recording.tokens)
    for call, row_ends in enumerate(calls):
        lattice = jax.tree.map(np.asarray, _lattices(replay, row_ends))
        for row, end in enumerate(row_ends):
            views.append(
                view_block(
                    tokens[row, :end],
                    lattice.tokens[row],
                    lattice.log_probs[row],
                    tokens[row, end : end + size],
                    {} if drafts is None else {refined.label: drafts[call][row]},
                )
            )
    # The first of the blocks with the largest gain.
    return max(views, key=lambda view: view.gain)


def _lattices(replay: Replay, ends: np.ndarray) -> Lattice:
    """The lattice of every text after its first `ends[row]` tokens."""
    rows = np.arange(len(ends))
    model, hidden = replay.model, jnp.asarray(np.stack([rows, ends - 1], axis=1))
    candidates = model.block_candidates(hidden, model.block_size, model.width)
    return build_lattice(model.recording.tokens[rows, ends], *candidates)


def _drafts(
    decoder: Decoder, replay: Replay, refined: MethodResult, calls: np.ndarray
) -> list[np.ndarray]:
    """The winning draft after every beginning of every text, `[calls][R, L]`."""
    replayer = replay.decoder(width=replay.model.width, alpha=decoder.alpha)
    task = replayer.task(refined.method, replay.options)
    tokens = np.asarray(replay.model.recording.tokens)
    rows = range(len(tokens))
    beginnings = [tokens[row, : ends[row]] for ends in calls for row in rows]
    drafts = []
    for call in range(len(calls)):
        chosen = [call * len(rows) + row for row in rows]
        new_tokens = replay.options.max_new_tokens
        state = task.prefill(beginnings, chosen, len(rows), new_tokens)
        history = task.run(state, 1).history
        assert history is not None
        drafts.append(np.asarray(history.drafts[0]))
    return drafts
