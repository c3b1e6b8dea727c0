"""The decoding methods by name, and how to run one.

autoregressive   one token per serial call: the reference
bpd              every head's best token (Stern et al. 2018)
zero_gram:P      the P best drafts under the heads' own scores
ngram:P          the P best under heads and an n-gram model, by OpenFst
oracle           the best that the lattice holds: an upper bound
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.generate import Generation, generate
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.drafters.autoregressive import AutoregressiveDrafter
from bpd_jax.drafting.drafters.blockwise import BlockwiseDrafter
from bpd_jax.drafting.drafters.oracle import OracleDrafter, Reference
from bpd_jax.drafting.interface import Drafter, Rescorer
from bpd_jax.drafting.rescorers.independent import IndependentRescorer
from bpd_jax.errors import UserError
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.typing import Params, PyTree

AUTOREGRESSIVE, BPD, ZERO_GRAM, NGRAM, ORACLE = KINDS = (
    "autoregressive",
    "bpd",
    "zero_gram",
    "ngram",
    "oracle",
)


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
      kind: one of `KINDS`.
      num_drafts: P, drafts checked per serial call (the paper's p).
    """

    kind: str
    num_drafts: int = 1

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"{self.kind}:{self.num_drafts}" if self.has_drafts else self.kind

    @property
    def has_drafts(self) -> bool:
        """Whether P is a choice for this kind."""
        return self.kind in (ZERO_GRAM, NGRAM)

    def label(self, ngram: NGramModel | None) -> str:
        """What people read in tables."""
        labels = {AUTOREGRESSIVE: "Autoregressive", BPD: "BPD", ORACLE: "Oracle"}
        if self.kind in labels:
            return labels[self.kind]
        order = 0 if self.kind == ZERO_GRAM or ngram is None else ngram.order
        return f"{self.num_drafts}-best {order}-gram"


def parse_method(text: str) -> Method:
    """Reads a method's name.

    >>> parse_method("ngram:16")
    Method(kind='ngram', num_drafts=16)

    Raises:
      UserError: there is no such method.
    """
    match = re.fullmatch(r"([a-z_]+)(?::([1-9]\d*))?", text.strip())
    if match is None or match[1] not in KINDS:
        raise UserError(
            f"unknown method {text!r}: choose from {', '.join(KINDS)}, with the number "
            "of drafts after zero_gram and ngram, as in ngram:16."
        )
    method = Method(match[1], int(match[2] or 1))
    if match[2] and not method.has_drafts:
        raise UserError(f"method {method.kind} takes no number of drafts: {text!r}.")
    return method


class Decoder:
    """A model with what its drafting methods need; decodes by any of them."""

    def __init__(
        self,
        model: ModelFunctions,
        params: Params,
        *,
        width: int = 16,
        alpha: float = 1.0,
        ngram: NGramModel | None = None,
    ) -> None:
        """Binds model and methods together.

        Args:
          model: functions of the model.
          params: its parameters.
          width: W, lattice candidates per head (the paper's k).
          alpha: weight of the n-gram's log-probability.
          ngram: for the method `ngram`.

        Raises:
          UserError: W or the n-gram model does not fit the model.
        """
        vocab_size = model.config.trunk.vocab_size
        if not 1 <= width <= vocab_size:
            raise UserError(
                f"lattice_width is {width}: it must lie between 1 and the vocabulary's "
                f"{vocab_size} tokens."
            )
        if ngram is not None and ngram.vocab_size != vocab_size:
            raise UserError(
                f"the n-gram model has {ngram.vocab_size} tokens and the language "
                f"model {vocab_size}: build the n-gram model with the language model's "
                "tokenizer (build_ngram --vocabulary=RUN_FOLDER)."
            )
        self.model, self.params = model, params
        self.width, self.alpha, self.ngram = width, alpha, ngram
        self._drafters: dict[Method, Drafter] = {}

    def drafter(self, method: Method) -> Drafter:
        """The drafter of `method`, made once.

        Raises:
          UserError: the method asks for something that is not there.
        """
        if method not in self._drafters:
            self._drafters[method] = self._make_drafter(method)
        return self._drafters[method]

    def _make_drafter(self, method: Method) -> Drafter:
        block = self.model.block_size
        if method.kind == AUTOREGRESSIVE:
            return AutoregressiveDrafter()
        if block == 1:
            raise UserError(
                f"the model has no block heads, so method {method.name} has nothing to "
                "draft from: use the method autoregressive."
            )
        if method.kind == ORACLE:
            return OracleDrafter(block, self.width)
        rescorer: Rescorer
        if method.kind == NGRAM:
            if self.ngram is None:
                raise UserError(
                    f"method {method.name} needs an n-gram model: build one with "
                    "python -m bpd_jax.build_ngram and pass its folder as --ngram."
                )
            # pynini may be missing where no n-gram method is used.
            from bpd_jax.drafting.rescorers.fst import FstRescorer

            rescorer = FstRescorer(self.ngram, method.num_drafts, self.alpha)
        else:
            rescorer = IndependentRescorer(method.num_drafts)
        width = 1 if method.kind == BPD else self.width
        return BlockwiseDrafter(rescorer, block, width)

    def decode(
        self,
        method: Method,
        prompts: Sequence[np.ndarray],
        options: DecodeOptions,
        *,
        reference: Sequence[Generation] | None = None,
        on_progress: Callable[[int], object] = lambda tokens: None,
    ) -> list[Generation]:
        """Decodes every prompt by `method`.

        Args:
          method: what to draft.
          prompts: token ids, each `[T]`.
          options: lengths, temperature, batch size.
          reference: for the oracle: the same prompts decoded autoregressively with
            the same options; decoded here if not given.
          on_progress: called after each batch with the number of new tokens.
        """
        drafter = self.drafter(method)
        make_draft_state = None
        if method.kind == ORACLE:
            if reference is None:
                reference = self.decode(Method(AUTOREGRESSIVE), prompts, options)
            make_draft_state = _look_up(reference)
        return generate(
            self.model,
            self.params,
            drafter,
            prompts,
            options,
            make_draft_state=make_draft_state,
            on_progress=on_progress,
        )


def _look_up(
    reference: Sequence[Generation],
) -> Callable[[Sequence[int], int, int], PyTree]:
    """Makes the oracle's draft state for a batch of prompts."""

    def make(indices: Sequence[int], batch: int, slots: int) -> Reference:
        tokens = np.zeros((batch, slots), np.int32)
        for row, index in enumerate(indices):
            known = reference[index]
            text = np.concatenate([known.input_ids, known.output_ids])
            tokens[row, : len(text)] = text
        return Reference(jnp.asarray(tokens))

    return make
