"""Random models to decode, with drafters, refiners and n-grams."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.decoder import Decoder
from bpd_jax.drafting.assets import Assets, AttachedDrafter, AttachedEagle
from bpd_jax.models import device_ops
from bpd_jax.models.attachment_files import LoadedRefiner, save_drafter, save_heads
from bpd_jax.models.attention import causal_mask
from bpd_jax.models.block_drafter import with_softmax
from bpd_jax.models.block_heads import init_heads, is_trained
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.decoding_parameters import decoding_layout, stacked_layers
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.models.eagle import EagleConfig, EagleFunctions
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import abstract_parameters, parameter_shapes
from bpd_jax.models.quantized import rounded
from bpd_jax.models.rotary import RotaryConfig
from bpd_jax.models.trained_refiners import MarkovConfig
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz

# What tells a Llama from a GPT-2.
LLAMA = {
    "activation": "silu",
    "gated": True,
    "use_bias": False,
    "norm": "rms",
    "rotary": RotaryConfig(100.0),
}


# Equal models are made once: finding out their shapes takes longer than decoding.
@functools.cache
def make_model(seed=0, block_size=4, vocab_size=13, draft_vocabulary=None, **trunk):
    """A small transformer with random parameters, and logits well apart.

    With a draft vocabulary, every second token is in it.
    """
    fields = {"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 2}
    config = BlockwiseConfig(
        TransformerConfig(vocab_size, **{**fields, "max_length": 160, **trunk}),
        BlockHeadsConfig(block_size, hidden=8) if block_size > 1 else None,
    )
    params = random_params(_shapes(config), 0.3, seed)
    if draft_vocabulary:
        heads = dataclasses.replace(config.heads, draft_vocabulary=draft_vocabulary)
        ids = np.arange(0, vocab_size, 2, dtype=np.int32)[:draft_vocabulary]
        trunk = BlockwiseConfig(config.trunk)
        params["heads"] = random_heads(trunk, params, heads, ids)
        config = dataclasses.replace(config, heads=heads)
    return Model(config, params)


_shapes = functools.cache(parameter_shapes)


def random_params(shapes, deviation, seed):
    """Random arrays of the given shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, deviation, x.shape), x.dtype), shapes
    )


def sharded_model(model, mesh):
    """A model whose parameters are distributed over a mesh, its layers stacked."""
    params = jax.device_put(model.params, _shardings(model.config, mesh))
    trunk = stacked_layers(params["trunk"], model.config.trunk, mesh)
    params = {**params, "trunk": trunk}
    return dataclasses.replace(model, params=params, mesh=mesh)


@functools.cache
def _shardings(config, mesh):
    return jax.tree.map(lambda x: x.sharding, abstract_parameters(config, mesh))


def rounded_model(model, mesh=None, *, integer_products=False):
    """A model with matrices in 8 bits, in the layout for decoding, or on a mesh."""
    if mesh is not None:
        params = jax.device_put(model.params, _shardings(model.config, mesh))
        model = dataclasses.replace(model, params=params, mesh=mesh)
    trunk, _ = rounded(model.params["trunk"])
    if integer_products:
        width = model.config.trunk.head_width
        ops = device_ops.current()
        ops.check_integers(model.config.trunk)
        params = {**model.params, "trunk": ops.integer_layout(trunk)}
        dtype = ops.cache_dtype("int8", width)
        return dataclasses.replace(model, params=params, cache_dtype=dtype)
    trunk = decoding_layout(trunk, model.config.trunk.dtype, mesh)
    return model.with_params({**model.params, "trunk": trunk})


def make_drafter(model, *, feature_layers=(0,), seed=3, **config):
    """A block drafter with random parameters; by default it knows 9 of the tokens."""
    trunk = model.config.trunk
    sizes = {"block_size": 5, "num_layers": 1, "window": 8, "draft_vocabulary": 9}
    sizes = {**sizes, "reads_last_token": True, **config}
    drafter = DrafterFunctions(BlockDrafterConfig(feature_layers, **sizes), trunk)
    vocabulary = None
    if sizes["draft_vocabulary"] is not None:
        ids = np.random.default_rng(seed).permutation(trunk.vocab_size)
        vocabulary = np.sort(ids[: sizes["draft_vocabulary"]].astype(np.int32))
    trained = random_params(_drafter_shapes(drafter), 0.5, seed)
    softmax = model.params["trunk"]["embedding"]
    params = with_softmax(trained, softmax, vocabulary)
    return AttachedDrafter.of(drafter, params)


def make_eagle(model, *, seed=4, **config):
    """An EAGLE-3 drafter with random parameters, which knows 9 of the tokens."""
    trunk = model.config.trunk
    fields = {**LLAMA, "activation": "gelu", "dtype": trunk.dtype}
    layer = TransformerConfig(trunk.vocab_size, 1, trunk.d_model, 24, 2, 1, **fields)
    functions = EagleFunctions(EagleConfig(layer, (0,), draft_vocabulary=9, **config))
    ids = np.random.default_rng(seed).permutation(trunk.vocab_size)[:9]
    embedding = model.params["trunk"]["embedding"]
    params = with_softmax(
        random_params(_drafter_shapes(functions), 0.5, seed), embedding, np.sort(ids)
    )
    return AttachedEagle(functions, {**params, "embedding": embedding})


@functools.cache
def _drafter_shapes(drafter):
    return jax.eval_shape(drafter.init, jax.random.key(0))


@functools.cache
def make_refiner(vocab_size=13, heads=4, d_model=16):
    """A Markov refiner with random parameters."""
    config = MarkovConfig(vocab_size, d_model, heads)
    shapes = jax.eval_shape(lambda: config.init(jax.random.key(0)))
    return LoadedRefiner(config, random_params(shapes, 0.3, 2), {})


def random_heads(model, params, config, vocabulary=None, *, deviation=0.3, seed=1):
    """New heads of a model, with random values added to all that is trained."""
    ids = vocabulary if config.draft_vocabulary else None
    heads = init_heads(model, params, config, jax.random.key(seed), ids)
    drawn = {name: heads[name] for name in heads if is_trained(config, name)}
    noise = random_params(drawn, deviation, seed)
    return heads | {name: heads[name] + value for name, value in noise.items()}


def save_random_heads(folder, loaded, config, vocabulary=None, *, seed=0, **options):
    """Saves random block heads of a loaded model; options are those of `save_heads`."""
    model = loaded.config
    heads = random_heads(
        model, loaded.params, config, vocabulary, deviation=1, seed=seed
    )
    save_heads(folder, config, heads, **{**_base(loaded), **options})


def save_random_drafter(folder, loaded, config, *, seed=0, **options):
    """Saves a new block drafter of a loaded model, as `save_random_heads` does."""
    trunk = loaded.config.trunk
    functions = DrafterFunctions(config.resolve(trunk), trunk)
    params = functions.init(jax.random.key(seed))
    if config.draft_vocabulary:
        params["vocabulary"] = np.arange(config.draft_vocabulary, dtype=np.int32)
    save_drafter(folder, functions.config, params, **{**_base(loaded), **options})


def _base(loaded):
    trunk = loaded.config.trunk
    return {
        "base": loaded.fingerprint,
        "base_name": loaded.name,
        "d_model": trunk.d_model,
        "vocab_size": trunk.vocab_size,
        "facts": {},
    }


def make_prompts(lengths, vocab_size=13, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).astype(np.int32) for n in lengths]


@functools.cache
def make_ngram(vocab_size=13):
    """A trigram model of random texts."""
    texts = make_prompts([60] * 10, vocab_size, seed=5)
    counts = count_ngrams(texts, order=3, vocab_size=vocab_size, end_of_text=0)
    return estimate_katz(counts)


def make_assets(model, seed=3, drafter=(), **eagle):
    """All assets of a model with four heads or another number."""
    vocab_size = model.config.trunk.vocab_size
    small = make_model(seed, 1, vocab_size, num_layers=1, max_length=80)
    sizes = vocab_size, model.block_size, model.config.trunk.d_model
    return Assets(
        ngram=make_ngram(vocab_size),
        rescorer=small,
        draft_model=small,
        drafter=make_drafter(model, seed=5, **dict(drafter)),
        eagle=make_eagle(model, **eagle),
        markov=make_refiner(*sizes),
    )


def make_small_decoder():
    """A decoder with four heads of one layer, and a trigram model of random texts."""
    model = make_model(num_layers=1, max_length=64)
    return Decoder(model, width=6, assets=Assets(ngram=make_ngram()))


@functools.partial(jax.jit, static_argnames="layers")
def read_texts(model, tokens, layers=()):
    """Logits, hidden states, keys and values, and layers, from one pass over texts."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = causal_mask(jnp.ones_like(tokens))
    hidden, new, features = model.forward(tokens, positions, mask, layers=layers)
    return model.next_token_logits(hidden), hidden, new, features


# The fields of a generation that do not depend on time.
STEPS = ("output_ids", "drafts", "accepted", "ranks", "proposed", "nodes")


def assert_same(generations, others, *fields):
    """Checks that two decodings of the same prompts agree in some fields."""
    for a, b in zip(generations, others, strict=True):
        for name in fields:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)
