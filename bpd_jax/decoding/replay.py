"""Replay: decode known texts again by other methods, without running the model.

With the text fixed, block efficiency depends on nothing but what each method drafts at
each position, and that on the heads' lattice there. One pass over the texts records the
lattices; a `RecordedModel` then plays the model's part in the very loop that decodes,
by looking up what it said. Every method, weight, width and number of drafts follows at
the price of its drafting. (Not lookahead, which asks the model about other texts.)
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Generation, generate
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeConfig, DecodeOptions
from bpd_jax.decoding.recorded_drafter import recorded_drafter
from bpd_jax.decoding.recording import (
    RecordedModel,
    RecordedText,
    Recording,
    assemble,
    padded_sizes,
    record_text,
)
from bpd_jax.decoding.refill import padded_length
from bpd_jax.drafting.assets import Assets
from bpd_jax.errors import UserError
from bpd_jax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Replay:
    """Texts with what the model said along them.

    Attributes:
      texts: what was decoded, one per prompt.
      recording: what the model said.
      model: answers from it.
      assets: what methods draft with.
      options: how far the texts were decoded.
      token_bytes: the model's, for stop texts; see `Decoder`.
      padded: to which prompts are padded; None for the least. Replays of equal sizes
        share their compiled programs.
    """

    texts: tuple[RecordedText, ...]
    recording: Recording
    model: RecordedModel
    assets: Assets
    options: DecodeOptions
    token_bytes: Callable[[], Sequence[bytes]] | None = None
    padded: int | None = None

    def decoder(
        self,
        *,
        width: int = DecodeConfig.lattice_width,
        alpha: float = DecodeConfig.alpha,
    ) -> Decoder:
        """Decodes from the recording; see `Decoder` for the arguments.

        Raises:
          UserError: fewer candidates were recorded than `width`.
        """
        if width > self.model.width:
            raise UserError(
                f"{self.model.width} candidates per head were recorded: give a "
                f"lattice_width of at most that, not {width}."
            )
        # It has the methods of `ModelFunctions` that decoding calls.
        model: PyTree = self.model
        return Decoder(
            model,
            self.recording,
            width=width,
            alpha=alpha,
            assets=self.assets,
            token_bytes=self.token_bytes,
        )

    def decode(
        self,
        method: Method,
        decoder: Decoder | None = None,
        *,
        every_position: bool = False,
    ) -> list[Generation]:
        """What decoding by `method` would do: same drafts, same calls, same tokens.

        Only which draft won a text's last call may differ, where that depends on what
        would follow the end. `seconds` are those of drafting alone.

        Args:
          method: any but lookahead; its `k` at most what was recorded.
          decoder: from `decoder()`, to be used again.
          every_position: draft at every token of the texts, not only where decoding
            calls the model: entry t of what is returned is what a call at token t
            would draft and yield.
        """
        check_replayable(method)
        k = method.setting("k") or 0
        if k > self.model.width:
            raise UserError(
                f"{method.name} asks for {k} candidates per head, but "
                f"{self.model.width} were recorded."
            )
        if method.needs_hidden and self.recording.hidden is None:
            raise UserError(f"{method.name} needs a recording with hidden states.")
        decoder = decoder or self.decoder(width=self.model.width)
        prompts = [text.input_ids for text in self.texts]
        options = self.options
        if every_position:
            options = dataclasses.replace(options, stride=1)
        task = decoder.prepare(method, prompts, options, reference=self.texts)
        return generate(task, prompts, padded=self.padded)

    def accuracies(
        self, ranks: int = 10, least: int = 1
    ) -> tuple[tuple[float, ...], ...]:
        """How often the candidate of each rank of heads 2 … L is the right token.

        Args:
          ranks: candidates of each head that are looked at.
          least: tokens that every head must have guessed.

        Raises:
          UserError: the texts are too few or too short for that.
        """
        found = []
        for head in range(self.model.block_size - 1):
            hits, count = np.zeros(min(ranks, self.model.width)), 0
            for text in self.texts:
                # Where token t comes next, head h + 2 predicts token t + h + 1.
                guessed = max(len(text.output_ids) - head - 1, 0)
                right = text.output_ids[head + 1 :, None]
                hits += (text.candidates[:guessed, head, :ranks] == right).sum(0)
                count += guessed
            if count < least:
                raise UserError(
                    f"head {head + 2} could guess only {count} tokens of the texts, "
                    f"fewer than {least}: decode more of them, or longer ones."
                )
            found.append(tuple((hits / count).tolist()))
        return tuple(found)


def check_replayable(method: Method) -> None:
    """Raises a `UserError` for lookahead."""
    if method.needs_model:
        raise UserError("lookahead cannot be replayed: it asks the model itself.")


def record(
    decoder: Decoder,
    texts: Sequence[Generation],
    options: DecodeOptions,
    *,
    width: int | None = None,
    keep_hidden: bool = False,
    on_progress: Callable[[int], object] = lambda texts: None,
) -> Replay:
    """Runs the model once over decoded texts.

    Args:
      decoder: the model that wrote them.
      texts: what it decoded, by whatever method.
      options: with which it did; greedy ones.
      width: candidates kept per head, at most the draft vocabulary; by default
        the decoder's.
      keep_hidden: also keep hidden states, for hydra and recurrent.
      on_progress: called after each text with the number 1.

    Raises:
      UserError: the texts were not decoded greedily, or there are none.
    """
    if options.temperature != 0 or not texts:
        raise UserError("replay needs at least one text that was decoded greedily.")
    width = min(width or decoder.width, decoder.model.config.draft_vocab_size)
    most, positions = padded_sizes(texts)
    recorded = []
    for text in texts:
        # A few sizes, so that few programs are compiled and short texts stay short.
        slots = min(padded_length(len(text.input_ids) + positions), most)
        recorded.append(
            record_text(decoder, text, width, slots=slots, positions=positions)
        )
        on_progress(1)
    return replay_of(decoder, recorded, options, keep_hidden=keep_hidden)


def replay_of(
    decoder: Decoder,
    texts: Sequence[RecordedText],
    options: DecodeOptions,
    *,
    keep_hidden: bool = False,
    sizes: tuple[int, int] | None = None,
    padded: int | None = None,
) -> Replay:
    """A replay of texts that were recorded before; arguments are those of `record`.

    Args:
      decoder: with the model that was recorded.
      texts: what `record_text` returned.
      options: with which they were decoded.
      keep_hidden: as in `record`.
      sizes: of the recording; see `assemble`.
      padded: see `Replay`.
    """
    recording = assemble(texts, decoder.params if keep_hidden else None, sizes)
    width = texts[0].candidates.shape[2]
    return Replay(
        tuple(texts),
        recording,
        RecordedModel(decoder.model.config, width),
        _recorded_assets(decoder.assets, texts, recording),
        dataclasses.replace(options, batch_size=len(texts)),
        decoder.token_bytes,
        padded,
    )


def _recorded_assets(
    assets: Assets, texts: Sequence[RecordedText], recording: Recording
) -> Assets:
    """Assets in which a block drafter, if there is one, answers from the recording."""
    drafts = [text.drafter for text in texts if text.drafter is not None]
    if assets.drafter is None or len(drafts) < len(texts):
        return dataclasses.replace(assets, drafter=None)
    starts = [len(text.input_ids) - 1 for text in texts]
    positions = recording.candidates.shape[1]
    drafter = recorded_drafter(assets.drafter, starts, drafts, positions)
    return dataclasses.replace(assets, drafter=drafter)
