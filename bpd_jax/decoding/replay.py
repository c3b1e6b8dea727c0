"""Replay: decodes known texts again with other methods, without running the model.

For a given text, block efficiency depends only on the drafts at each position, and
these on the heads' lattice at that position. One pass over the texts records the
lattices. A `RecordedModel`, which looks up the recorded outputs, then takes the model's
place in the decoding loop. So every method, weight, width and number of drafts costs
only its drafting. (Lookahead cannot be replayed, because it runs the model on other
texts.)
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.typing import PyTree
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
from bpd_jax.decoding.refill import refill_length
from bpd_jax.drafting.assets import Assets


@dataclasses.dataclass(frozen=True)
class Replay:
    """Decoded texts with the recorded outputs of the model.

    Attributes:
      texts: the decoded texts, one per prompt.
      model: looks up the outputs of the model in a recording.
      options: options with which the texts were decoded.
      token_bytes: bytes of the model's tokens, for stop texts; see `Decoder`.
      padded: length to which prompts are padded; None for the shortest possible.
        Replays of equal sizes share their compiled programs.
    """

    texts: tuple[RecordedText, ...]
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
        """A decoder that uses the recording; see `Decoder` for the arguments."""
        if width > self.model.width:
            raise UserError(
                f"lattice_width is {width}, but only {self.model.width} candidates per "
                "head were recorded."
            )
        # `RecordedModel` has the methods of `Model` that decoding calls.
        model: PyTree = self.model
        return Decoder(
            model,
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
        """Replays decoding by `method`: the same drafts, serial calls and tokens.

        Only the winning draft of a text's last call may differ, if it depends on tokens
        after the end. `seconds` are those of drafting alone.

        Args:
          method: any method except lookahead.
          decoder: a result of `decoder()`, to use it again.
          every_position: whether to draft at every token of the texts rather than where
            decoding calls the model. Entry t of a result is then that of a serial call
            at token t.
        """
        check_replayable(method)
        k = method.setting("k") or 0
        if k > self.model.width:
            raise UserError(
                f"{method.name} needs {k} candidates per head, but only "
                f"{self.model.width} were recorded."
            )
        decoder = decoder or self.decoder(width=self.model.width)
        prompts = [text.input_ids for text in self.texts]
        # The texts show the choices of the adjusted logits.
        options = self.options.without_adjustments()
        if every_position:
            options = dataclasses.replace(options, stride=1)
        task = decoder.prepare(method, prompts, options, reference=self.texts)
        return generate(task, prompts, padded=self.padded)

    def accuracies(
        self, ranks: int = 10, least: int = 1
    ) -> tuple[tuple[float, ...], ...]:
        """The share of right candidates by rank, for heads 2 … L.

        Args:
          ranks: number of candidates of each head.
          least: lowest number of predicted tokens of every head.
        """
        accuracies = []
        for head in range(self.model.block_size - 1):
            hits, count = np.zeros(min(ranks, self.model.width)), 0
            for text in self.texts:
                # Before token t, head h + 2 predicts token t + h + 1.
                predicted = max(len(text.output_ids) - head - 1, 0)
                right = text.output_ids[head + 1 :, None]
                hits += (text.candidates[:predicted, head, :ranks] == right).sum(0)
                count += predicted
            if count < least:
                raise UserError(
                    f"head {head + 2} predicts only {count} tokens of the texts, "
                    f"fewer than {least}: decode more or longer texts."
                )
            accuracies.append(tuple((hits / count).tolist()))
        return tuple(accuracies)


def check_replayable(method: Method) -> None:
    """Refuses methods that run the model or read its states."""
    if method.needs_model:
        raise UserError(
            f"{method.source.name} cannot be replayed, because it runs the model or "
            "reads states of its layers, which are not recorded: measure it with "
            "bpd_jax.evaluate."
        )


def record(
    decoder: Decoder,
    texts: Sequence[Generation],
    options: DecodeOptions,
    *,
    width: int | None = None,
    on_progress: Callable[[int], object] = lambda texts: None,
) -> Replay:
    """Runs the model once over decoded texts and records its outputs.

    Args:
      options: options with which they were decoded greedily.
      width: candidates recorded per head, at most the draft vocabulary; by default
        those of the decoder.
      on_progress: called with 1 after each text.
    """
    if options.temperature != 0 or not texts:
        raise UserError("replay needs at least one text that was decoded greedily.")
    width = min(width or decoder.width, decoder.model.config.draft_vocab_size)
    most, positions = padded_sizes(texts)
    recorded = []
    for text in texts:
        # Few different sizes, so that few programs are compiled.
        slots = min(refill_length(len(text.input_ids) + positions), most)
        recorded.append(
            record_text(decoder, text, width, slots=slots, positions=positions)
        )
        on_progress(1)
    return replay_of(decoder, recorded, options)


def replay_of(
    decoder: Decoder,
    texts: Sequence[RecordedText],
    options: DecodeOptions,
    *,
    sizes: tuple[int, int] | None = None,
    padded: int | None = None,
) -> Replay:
    """Makes a replay of recorded texts.

    Args:
      texts: results of `record_text`.
      options: options with which they were decoded.
      sizes: sizes of the recording; see `assemble`.
      padded: see `Replay`.
    """
    recording = assemble(texts, sizes)
    width = texts[0].candidates.shape[2]
    return Replay(
        tuple(texts),
        RecordedModel(decoder.model.config, width, recording),
        _recorded_assets(decoder.assets, texts, recording),
        dataclasses.replace(options, batch_size=len(texts)),
        decoder.token_bytes,
        padded,
    )


def _recorded_assets(
    assets: Assets, texts: Sequence[RecordedText], recording: Recording
) -> Assets:
    """Replaces a block drafter by its recorded candidates, if there are any."""
    drafts = [text.drafter for text in texts if text.drafter is not None]
    if assets.drafter is None or len(drafts) < len(texts):
        return dataclasses.replace(assets, drafter=None)
    starts = [len(text.input_ids) - 1 for text in texts]
    positions = recording.drafts.candidates.shape[1]
    drafter = recorded_drafter(assets.drafter, starts, drafts, positions)
    return dataclasses.replace(assets, drafter=drafter)
