"""A model with the assets of its drafting methods; decodes with any of them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import check_value, integer, number
from bpd_jax.decoding.aliases import bpd, prompt_lookup
from bpd_jax.decoding.decode_state import StopTable
from bpd_jax.decoding.generate import (
    Generation,
    Task,
    Text,
    check_prompts,
    generate,
    stream,
)
from bpd_jax.decoding.methods import GREEDY, Method
from bpd_jax.decoding.options import EXACT, SPECULATIVE, DecodeConfig, DecodeOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.interface import Drafter
from bpd_jax.drafting.parts import BuildContext, RefinerPart, find_part
from bpd_jax.drafting.refiners.ngram import NGram
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.drafting.sources.block import Block
from bpd_jax.drafting.sources.heads import Heads
from bpd_jax.drafting.sources.lookup import Lookup
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.model import Model
from bpd_jax.models.products import is_stored
from bpd_jax.models.transformer_config import INT8
from bpd_jax.ngrams.model import NGramModel

K = TypeVar("K")
T = TypeVar("T")


class _DefaultSizes(NamedTuple):
    """Sizes of the default method with a block drafter.

    Attributes:
      candidates: highest number of candidates per position that n-grams rescore; None
        is all of the lattice, and 0 that they do not. Without effect if the drafter has
        a Markov head, which rescores all of them.
      nodes: N of `tree:N`.
      copied: N of `lookup:N`; 0 for none.
      price: `Tree.price` where it is not measured (`call_price`); None where a call
        with drafts costs little more than one without.
    """

    candidates: int | None
    nodes: int
    copied: int
    price: float | None


# On a CPU, 8 candidates take less time than 16 and yield almost as many tokens a call.
_CPU_SIZES = _DefaultSizes(candidates=8, nodes=8, copied=4, price=1.4)
# Quantized weights are read several times as fast, so that arithmetic limits passes
# over several tokens: 8 take about twice as long as one (`benchmarks.row_products`).
_STORED_SIZES = _DefaultSizes(candidates=8, nodes=4, copied=0, price=1.6)
# Where integers are multiplied, kernels take up to 8 tokens at a time, and so few
# milliseconds are left that n-grams cost more than they gain.
_INTEGER_SIZES = _DefaultSizes(candidates=0, nodes=5, copied=3, price=1.7)
# On an accelerator, a pass over more tokens costs little more.
_ACCELERATOR_SIZES = _DefaultSizes(candidates=None, nodes=32, copied=8, price=None)


class Decoder:
    """Decodes with a model and any method."""

    def __init__(
        self,
        model: Model,
        *,
        width: int = DecodeConfig.lattice_width,
        alpha: float = DecodeConfig.alpha,
        assets: Assets | None = None,
        token_bytes: Callable[[], Sequence[bytes]] | None = None,
    ) -> None:
        """Creates a decoder.

        Args:
          width: W, the default number of lattice candidates per head (the paper's k);
            at most the vocabulary, and at most the draft vocabulary of the heads that a
            method uses.
          alpha: default weight of the refiners.
          token_bytes: returns the bytes of every token, for stop texts.
        """
        vocab_size = model.config.trunk.vocab_size
        check_value("lattice_width", width, integer(1, vocab_size))
        check_value("alpha", alpha, number(0))
        self.model = model
        self.width, self.alpha = width, alpha
        self.assets = assets or Assets()
        self.assets.check(model.config)
        self.token_bytes = token_bytes
        self._context = BuildContext(self.model, self.assets, width, alpha)
        self._drafters: dict[tuple[Method, float | None], Drafter] = {}
        self._stops: dict[tuple[str, ...], StopTable] = {}

    @property
    def ngram(self) -> NGramModel | None:
        """The n-gram model, if there is one."""
        return self.assets.ngram

    @property
    def refined_block(self) -> tuple[Block, tuple[RefinerPart, ...]]:
        """The block drafter with those of its refiners that are available.

        In trees of the shipped drafter, n-grams with a weight of 1 lose more than they
        gain.
        """
        drafter, candidates = self.assets.drafter, self._default_sizes.candidates
        candidates = self.width if candidates is None else candidates
        refined = self.ngram is not None and candidates > 0
        ngram = (NGram(alpha=0.25),) if refined else ()
        if drafter is not None and drafter.markov is not None:
            return Block(), (find_part("markov")(), *ngram)
        return Block(k=candidates if ngram and self.width > candidates else None), ngram

    @property
    def default_method(self) -> Method:
        """The method that is used unless another one is chosen.

        `bpd_jax.tune` finds the fastest method of a device.
        """
        sizes = self._default_sizes
        tree = Tree(sizes.nodes, price=sizes.price)
        lookup = Lookup(sizes.copied) if sizes.copied else None
        if self.assets.drafter is None and self.assets.eagle is None:
            if self.model.block_size == 1:
                return prompt_lookup()
            # Drafts of a single path rarely pay where passes are so short.
            quantized = sizes in (_STORED_SIZES, _INTEGER_SIZES)
            return Method(Heads(), (), tree, lookup) if quantized else bpd()
        if self.assets.drafter is None:
            return Method(find_part("eagle")(), (), Tree(sizes.nodes), lookup)
        return Method(*self.refined_block, tree, lookup)

    @property
    def _default_sizes(self) -> _DefaultSizes:
        if not on_cpu():
            return _ACCELERATOR_SIZES
        if self.model.precision == INT8:
            return _INTEGER_SIZES
        leaves = jax.tree.leaves(self.model.params, is_leaf=is_stored)
        quantized = any(is_stored(leaf) and leaf.is_quantized for leaf in leaves)
        return _STORED_SIZES if quantized else _CPU_SIZES

    def label(self, method: Method) -> str:
        """The display name of a method."""
        return method.label(None if self.ngram is None else self.ngram.order)

    def drafter(self, method: Method, options: DecodeOptions | None = None) -> Drafter:
        """The drafter of `method`, which is built once."""
        # Drafts are drawn only for speculative sampling.
        drawn = options is not None and options.acceptance == SPECULATIVE
        key = (method, options.temperature if drawn and options else None)
        context = dataclasses.replace(self._context, temperature=key[1])
        return remembered(self._drafters, key, lambda: method.build(context), 64)

    def task(
        self,
        method: Method,
        options: DecodeOptions,
        reference: Sequence[Text] | None = None,
    ) -> Task:
        """The task for `generate` and `stream`."""
        return Task(
            self.model,
            self.drafter(method, options),
            options,
            self._stop_table(options.stop) if options.stop else None,
            None if reference is None else functools.partial(_stacked, reference),
        )

    def _stop_table(self, stop: tuple[str, ...]) -> StopTable:
        """The automaton of stop texts, which is built once while they are few."""
        token_bytes = self.token_bytes
        if token_bytes is None:
            raise UserError("stop texts need the model's tokenizer.")
        texts = [text.encode() for text in stop]
        return remembered(self._stops, stop, lambda: StopTable.of(texts, token_bytes()))

    def check(
        self, method: Method, prompts: Sequence[np.ndarray], options: DecodeOptions
    ) -> None:
        """Checks the arguments of `decode` without compiling or decoding."""
        check_prompts(self.model, prompts, options)
        if method.is_oracle and options.acceptance != EXACT:
            raise UserError(
                f"the oracle drafts a text that {options.acceptance} acceptance would "
                "not decode: use acceptance=exact."
            )
        self.task(method, options)
        for name in sorted(method.needs):
            small = getattr(self.assets, name)
            if isinstance(small, Model):
                check_prompts(small, prompts, options, "small model")

    def prepare(
        self,
        method: Method,
        prompts: Sequence[np.ndarray],
        options: DecodeOptions,
        *,
        reference: Sequence[Text] | None = None,
    ) -> Task:
        """Checks the arguments of `decode` and returns the task.

        For the oracle without a reference, it first decodes greedily.
        """
        self.check(method, prompts, options)
        if not method.is_oracle:
            return self.task(method, options)
        if reference is None:
            reference = self.decode(GREEDY, prompts, options)
        return self.task(method, options, reference)

    def decode(
        self,
        method: Method,
        prompts: Sequence[np.ndarray],
        options: DecodeOptions,
        *,
        reference: Sequence[Text] | None = None,
        on_progress: Callable[[int], object] = lambda tokens: None,
    ) -> list[Generation]:
        """Decodes every prompt with `method`.

        Args:
          prompts: token ids, each `[T]`.
          reference: for the oracle: the same prompts decoded greedily with the same
            options; None to decode them here.
          on_progress: called after each batch with the number of new tokens.
        """
        task = self.prepare(method, prompts, options, reference=reference)
        return generate(task, prompts, on_progress=on_progress)

    def stream(
        self, method: Method, prompt: np.ndarray, options: DecodeOptions
    ) -> Iterator[tuple[np.ndarray, Generation | None]]:
        """Decodes one prompt and yields tokens as they are decoded; see `stream`."""
        return stream(self.prepare(method, [prompt], options), prompt)


def remembered(known: dict[K, T], key: K, make: Callable[[], T], most: int = 8) -> T:
    """`known[key]`, which is made if it is missing; the oldest of `most` gives way."""
    if key not in known:
        made = make()
        while len(known) >= most:
            del known[next(iter(known))]
        known[key] = made
    return known[key]


def _stacked(
    texts: Sequence[Text], indices: Sequence[int], batch: int, slots: int
) -> np.ndarray:
    """Some of the oracle's texts, `[batch, slots]` int32, padded with zeros."""
    tokens = np.zeros((batch, slots), np.int32)
    for row, index in enumerate(indices):
        ids = np.concatenate([texts[index].input_ids, texts[index].output_ids])
        tokens[row, : len(ids)] = ids
    return tokens
