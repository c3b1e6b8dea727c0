"""The one-file example agrees with the library: n-gram, drafts, decoded tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("pynini")
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.engines.fst import FstEngine
from bpd_jax.drafting.lattice import Lattice
from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model import Model
from bpd_jax.models.parameters import parameter_shapes
from bpd_jax.models.transformer_config import TransformerConfig
from bpd_jax.ngrams.counting.counts import count_ngrams
from bpd_jax.ngrams.katz import estimate_katz
from experiments.minimal import bpd

TEXT = "a lighthouse keeper lit the lamp and wrote: the sea is calm. " * 8 + "zebra x"
VOCABULARY = sorted(set(TEXT))
TOKENS = np.array([VOCABULARY.index(character) for character in TEXT])
SIZE = len(VOCABULARY)


@pytest.fixture(scope="module")
def ngrams():
    """The bigram of the example as an automaton, and the library's."""
    library = estimate_katz(count_ngrams([TOKENS], order=2, vocab_size=SIZE))
    return bpd.automaton(*bpd.katz(TOKENS, SIZE), SIZE), library


@pytest.fixture(scope="module")
def model():
    """Parameters after a few steps, with drafts that are partly accepted."""
    params = bpd.train(TOKENS, SIZE, steps=12)
    noise = 0.2 * jax.random.normal(jax.random.key(1), params["head_out"].shape)
    return {**params, "head_out": params["head_out"] + 0.05 * noise}


def library_model(params):
    config = BlockwiseConfig(
        TransformerConfig(
            SIZE, bpd.LAYERS, bpd.WIDTH, bpd.HIDDEN, bpd.ATTENTION_HEADS,
            max_length=bpd.LENGTH, activation="relu", use_bias=False, norm="rms",
        ),
        BlockHeadsConfig(bpd.L, hidden=bpd.WIDTH),
    )  # fmt: skip
    trunk = {
        "embedding": params["embedding"],
        "position_embedding": params["position"],
        "final_norm": {"scale": jnp.ones(bpd.WIDTH)},
    }
    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    for number, layer in enumerate(params["layers"]):
        trunk |= {
            f"attention_{number}": {n: {"kernel": layer[x]} for n, x in names.items()},
            f"mlp_{number}": {
                "input": {"kernel": layer["in"]},
                "output": {"kernel": layer["out"]},
            },
            f"attention_norm_{number}": {"scale": jnp.ones(bpd.WIDTH)},
            f"mlp_norm_{number}": {"scale": jnp.ones(bpd.WIDTH)},
        }
    heads = {
        "kernel_in": params["head_in"],
        "bias_in": jnp.zeros((bpd.L - 1, bpd.WIDTH)),
        "kernel_out": params["head_out"],
        "bias_out": jnp.zeros((bpd.L - 1, bpd.WIDTH)),
    }
    converted = {"trunk": trunk, "heads": heads}
    shapes = jax.tree.map(lambda x: x.shape, parameter_shapes(config))
    assert jax.tree.map(jnp.shape, converted) == shapes
    return Model(config, converted)


def test_drafts_are_the_p_best_of_the_librarys_fst_engine(ngrams):
    automaton, library = ngrams
    rng = np.random.default_rng(0)
    engine = FstEngine(library, alpha=bpd.ALPHA)
    for certain in range(0, SIZE, 3):
        logits = rng.normal(0, 2, (bpd.L - 1, SIZE)).astype(np.float32)
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        best = np.argsort(-log_probs, kind="stable")[:, : bpd.K]
        first = np.full((1, bpd.K), certain)
        scores = np.take_along_axis(log_probs, best, axis=1)
        first_scores = [[0.0, *[-np.inf] * (bpd.K - 1)]]
        lattice = Lattice(
            np.concatenate([first, best])[None],
            np.concatenate([first_scores, scores])[None],
            np.zeros((1, bpd.L)),
        )
        want = engine.refine(lattice, np.zeros((1, 0), int), bpd.P)
        drafts = bpd.best_drafts(log_probs, certain, automaton, bpd.P)
        assert drafts.tolist() == want.tokens[0].tolist()


def test_tokens_and_calls_are_the_librarys(model, ngrams):
    automaton, library = ngrams
    decoder = Decoder(
        library_model(model),
        width=bpd.K,
        alpha=bpd.ALPHA,
        assets=Assets(ngram=library),
    )
    prompts = [TOKENS[begin : begin + 20] for begin in (0, 33)]
    # The example has no end of text: the library decodes as many tokens.
    options = DecodeOptions(max_new_tokens=16)
    methods = {
        GREEDY: lambda x, text: x[:1].argmax(1)[None],
        parse_method("bpd"): lambda x, text: x.argmax(1)[None],
        parse_method(f"ngram_fst:{bpd.P}"): lambda x, text: bpd.best_drafts(
            x[1:], int(x[0].argmax()), automaton, bpd.P
        ),
    }
    plain = decoder.decode(GREEDY, prompts, options)
    for method, draft in methods.items():
        library_texts = decoder.decode(method, prompts, options)
        for prompt, greedy, text in zip(prompts, plain, library_texts, strict=True):
            tokens, calls = bpd.decode(model, prompt.tolist(), draft, new=16)
            assert tokens == greedy.output_ids.tolist()
            assert calls == text.serial_calls


def test_the_example_prints_the_block_efficiencies(capsys, monkeypatch):
    monkeypatch.setattr(bpd, "PROMPTS", 1)
    monkeypatch.setattr(bpd.decode, "__defaults__", (8,))
    monkeypatch.setattr(bpd, "NEW", 8)
    bpd.main(TEXT * 3, steps=2)
    printed = capsys.readouterr().out
    assert "  plain                             1.00\n" in printed
    assert "unrefined (0-gram)" in printed
