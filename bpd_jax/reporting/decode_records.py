"""Converts decoded texts to the records of a report."""

from collections.abc import Callable, Sequence

import numpy as np

from bpd_jax.decoding.decode_state import cut_at_stop
from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.reporting.records import DecodeRecord, Step

Piece = Callable[[int], str]
Decode = Callable[[Sequence[int]], str]


def decode_records(
    method: str,
    generations: Sequence[Generation],
    decode: Decode,
    piece: Piece,
    options: DecodeOptions,
    prompts: Sequence[str] | None = None,
    *,
    continuation: Decode | None = None,
) -> list[DecodeRecord]:
    """One record per prompt, with every serial call as a step.

    Texts end before a stop text.

    Args:
      method: name of the method.
      generations: one per prompt.
      decode: converts tokens to text.
      piece: converts one token to text.
      options: options of decoding.
      prompts: original texts of the prompts; None decodes their tokens.
      continuation: converts tokens after a prompt to text; None for `decode`.
    """
    continued = continuation or decode
    records = []
    for index, generation in enumerate(generations):
        steps = [
            Step(
                draft=[piece(token) for token in draft[draft >= 0]],
                accepted=int(accepted),
                rank=int(rank),
            )
            for draft, accepted, rank in zip(
                generation.drafts, generation.accepted, generation.ranks, strict=True
            )
        ]
        records.append(
            DecodeRecord(
                method=method,
                prompt_index=index,
                prompt=(
                    decode(visible(generation.input_ids, options))
                    if prompts is None
                    else prompts[index]
                ),
                text=cut_at_stop(
                    continued(visible(generation.output_ids, options)), options.stop
                ),
                input_ids=generation.input_ids.tolist(),
                output_ids=generation.output_ids.tolist(),
                serial_calls=generation.serial_calls,
                block_efficiency=generation.block_efficiency,
                seconds=generation.seconds,
                steps=steps,
            )
        )
    return records


def visible(tokens: np.ndarray, options: DecodeOptions) -> list[int]:
    """The tokens without begin and end tokens."""
    return [int(token) for token in tokens if token not in options.end_tokens]
