"""The decoding methods by name, and how to run one.

autoregressive   one token per serial call: the reference
bpd              every head's best token (Stern et al. 2018)
zero_gram:P      the P best drafts under the heads' own scores
ngram:P          the P best under heads and an n-gram model
oracle           the best that the lattice holds: an upper bound

The n-gram search has four engines; `ngram:P@ENGINE` names one:

device     exact, inside the jitted loop
viterbi    exact, on the host
fst        on the host by OpenFst as in the paper, with back-off as an epsilon arc
fst_exact  the same with failure arcs; exact
"""

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.generate import Generation, generate
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.drafters.autoregressive import AutoregressiveDrafter
from bpd_jax.drafting.drafters.blockwise import BlockwiseDrafter
from bpd_jax.drafting.drafters.oracle import OracleDrafter, Reference
from bpd_jax.drafting.interface import Drafter, Rescorer
from bpd_jax.drafting.rescorers.device import DeviceRescorer
from bpd_jax.drafting.rescorers.fst import FstRescorer
from bpd_jax.drafting.rescorers.independent import IndependentRescorer
from bpd_jax.drafting.rescorers.viterbi import ViterbiRescorer
from bpd_jax.errors import UserError
from bpd_jax.models.functions import ModelFunctions
from bpd_jax.ngrams.model import NGramModel
from bpd_jax.ngrams.search.finite import check_alpha
from bpd_jax.typing import Params, PyTree

AUTOREGRESSIVE, BPD, ZERO_GRAM, NGRAM, ORACLE = KINDS = (
    "autoregressive",
    "bpd",
    "zero_gram",
    "ngram",
    "oracle",
)

DEVICE, VITERBI, FST, FST_EXACT = ENGINES = ("device", "viterbi", "fst", "fst_exact")


_Engine = DeviceRescorer | ViterbiRescorer | FstRescorer

# More drafts than this in one serial call are a slip of the finger.
MOST_DRAFTS = 1024


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
      kind: one of `KINDS`.
      num_drafts: P, drafts checked per serial call (the paper's p).
      engine: of the n-gram search, one of `ENGINES`; None for the decoder's choice.
    """

    kind: str
    num_drafts: int = 1
    engine: str | None = None

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        name = f"{self.kind}:{self.num_drafts}" if self.has_drafts else self.kind
        return f"{name}@{self.engine}" if self.engine else name

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
        engine = f" ({self.engine})" if self.engine else ""
        return f"{self.num_drafts}-best {order}-gram{engine}"


def parse_method(text: str) -> Method:
    """Reads a method's name.

    >>> parse_method("ngram:16@device")
    Method(kind='ngram', num_drafts=16, engine='device')

    Raises:
      UserError: there is no such method.
    """
    match = re.fullmatch(r"([a-z_]+)(?::([1-9]\d*))?(?:@(\w+))?", text.strip())
    if match is None or match[1] not in KINDS:
        raise UserError(
            f"unknown method {text!r}: choose from {', '.join(KINDS)}, with the number "
            "of drafts after zero_gram and ngram, as in ngram:16."
        )
    method = Method(match[1], int(match[2] or 1), match[3])
    if match[2] and not method.has_drafts:
        raise UserError(f"method {method.kind} takes no number of drafts: {text!r}.")
    if method.num_drafts > MOST_DRAFTS:
        raise UserError(
            f"{method.name} asks for too many drafts: give {MOST_DRAFTS} or fewer."
        )
    if method.engine and method.kind != NGRAM:
        raise UserError(f"method {method.kind} takes no engine: {text!r}.")
    if method.engine:
        check_engine(method.engine)
    return method


def check_engine(engine: str) -> None:
    """Raises a `UserError` for an engine that does not exist."""
    if engine not in ENGINES:
        raise UserError(
            f"unknown n-gram engine {engine!r}: choose from {', '.join(ENGINES)}."
        )


def default_engine() -> str:
    """The fastest exact engine here: in the loop, or on the host's own processor."""
    on_host = jax.default_backend() == "cpu" and importlib.util.find_spec("numba")
    return VITERBI if on_host else DEVICE


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
        engine: str | None = None,
    ) -> None:
        """Binds model and methods together.

        Args:
          model: functions of the model.
          params: its parameters.
          width: W, lattice candidates per head (the paper's k).
          alpha: weight of the n-gram's log-probability.
          ngram: for the method `ngram`.
          engine: of the n-gram search where a method names none; by default
            `default_engine()`.

        Raises:
          UserError: W or the n-gram model does not fit the model, or there is no such
            engine.
        """
        vocab_size = model.config.trunk.vocab_size
        if not 1 <= width <= vocab_size:
            raise UserError(
                f"lattice_width is {width}: it must lie between 1 and the vocabulary's "
                f"{vocab_size} tokens."
            )
        check_alpha(alpha)
        if ngram is not None and ngram.vocab_size != vocab_size:
            raise UserError(
                f"the n-gram model has {ngram.vocab_size} tokens and the language "
                f"model {vocab_size}: build the n-gram model with the language model's "
                "tokenizer (build_ngram --vocabulary=RUN_FOLDER)."
            )
        self.model, self.params = model, params
        if engine is not None:
            check_engine(engine)
        self.width, self.alpha, self.ngram = width, alpha, ngram
        self.engine = engine or default_engine()
        self._drafters: dict[Method, Drafter] = {}
        self._engines: dict[str, _Engine] = {}

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
            engine = method.engine or self.engine
            # Methods that differ in P alone share the tables.
            if engine not in self._engines:
                self._engines[engine] = _ngram_engine(engine, self.ngram, self.alpha)
            rescorer = self._engines[engine].with_drafts(method.num_drafts)
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
        elif isinstance(drafter, BlockwiseDrafter):
            arrays = drafter.rescorer.arrays

            def make_draft_state(*_: object) -> PyTree:
                return arrays

        return generate(
            self.model,
            self.params,
            drafter,
            prompts,
            options,
            make_draft_state=make_draft_state,
            on_progress=on_progress,
        )


def _ngram_engine(engine: str, ngram: NGramModel, alpha: float) -> _Engine:
    """The n-gram search of an engine; numba and pynini come with theirs only."""
    if engine == DEVICE:
        return DeviceRescorer.from_model(ngram, 1, alpha)
    if engine == VITERBI:
        return ViterbiRescorer(ngram, 1, alpha)
    return FstRescorer(ngram, 1, alpha, exact=engine == FST_EXACT)


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
