"""What the caller of the decode loop decides."""

import dataclasses

from bpd_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class DecodeOptions:
    """How far and how tokens are chosen.

    Attributes:
      max_new_tokens: the most tokens decoded after each prompt.
      temperature: 0 is greedy; above 0 the model samples (see `decoding.choice`).
      end_of_text: a token that ends a row once it is decoded; None for no such token.
      seed: of the sampling noise.
      batch_size: B, prompts decoded together.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    end_of_text: int | None = None
    seed: int = 0
    batch_size: int = 8

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(
                f"max_new_tokens is {self.max_new_tokens}: it must be 1 or more."
            )
        if not 0 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}: it must be 0 (greedy) or above."
            )
        if self.batch_size < 1:
            raise UserError(f"batch_size is {self.batch_size}: it must be 1 or more.")
