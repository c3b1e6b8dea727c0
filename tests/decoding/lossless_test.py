"""Every method decodes the text of plain decoding, token for token.

In float32, greedily and with exact acceptance of sampled tokens, with every layout of
the drafts, on random models with random prompts, singly and in batches, on one device
and on eight. `METHODS` lists the methods for all tests.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding import decode_loop, generate
from bpd_jax.decoding.aliases import ALIASES
from bpd_jax.decoding.compare import differences, first_difference
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import BATCHED, SPECULATIVE, TREE, DecodeOptions
from bpd_jax.drafting.parts import parts
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.models.mesh import MeshConfig, make_mesh
from bpd_jax.models.rotary import RotaryConfig
from tests.decoding import random_models
from tests.decoding.random_models import (
    assert_same,
    make_assets,
    make_model,
    rounded_model,
    sharded_model,
)

# A factor of `CASES`: what drafts, refines and searches, with the smallest sizes at
# which it could go wrong, and how drafts are verified.
SOURCES = ["heads", "block:3", "eagle:3", "draft_model:3"]
REFINERS = ["", "+markov", "+ngram", "+neural"]
SEARCHES = [
    "greedy",
    "chains:2",
    "beam:2",
    "best:3",
    "static:6",
    "tree:6:min_prob=0.05",
    "cover:3",
    "oracle",
]
LAYOUTS = {
    "trees": {"verification": TREE, "batch_size": 5},
    "chains": {"verification": BATCHED, "batch_size": 5},
    "drawn trees": {"verification": TREE, "batch_size": 5, "temperature": 0.9},
    "drawn chains": {"verification": BATCHED, "batch_size": 1, "temperature": 0.9},
}
INSTRUCTIONS = ["avx2", "avx512", "no kernels"]

# Complete methods, and further settings of parts.
DISTINCT = [
    "zero_gram:3:lookup=4",
    "ngram_device:3:adaptive=1",
    "ngram_viterbi:4",
    "ngram_fst:2",
    "medusa_neural:5:order=block",
    "prompt_lookup:4",
    "lookahead:3:order=3",
    "draft_model:2:drafts=2",
    "heads+ngram+neural:mode=parallel/best:3",
    "heads:3:k=2+neural+ngram:adaptive=1/beam:2+lookup:3",
    "block+markov/tree:6:price=1.2",
    "block+markov+ngram/best:3",
]
# Methods whose parts are covered by others.
ALIKE = [
    "bpd:heads=2",
    "zero_gram:6:search=best",
    "ngram:1:search=greedy",
    "ngram:7:search=best:alpha=0.5",
    "ngram_device:2:slope=0.5",
    "medusa:8",
    "medusa_ngram:6:search=static",
    "neural:2:lookup=6",
    "neural:2:mode=parallel",
    "neural_ngram:2",
    "markov:2",
    "draft_model:3+neural/tree:24:min_prob=0.02",
    "heads+ngram:adaptive=1+neural/static:6:order=block",
    "block+ngram/best:2:engine=viterbi",
    "block:3+neural/tree:6:min_prob=0.05+lookup:4",
    "block:3/cover:2+lookup:3",
    "eagle:3+neural/tree:8+lookup:5",
]


def composed(source, refiner, search, *_):
    """The name of a method; None if its parts do not fit."""
    name = f"{source}{refiner}/{search}"
    # Building the search refuses what the text of a method does not show.
    finite = refiner != "+neural" and source in ("heads", "block:3")
    if (search == "oracle" and refiner) or (search.startswith("cover") and not finite):
        return None
    try:
        parse_method(name)
    except UserError:
        return None
    return name


def pairwise(*factors, possible):
    """Few of the possible cases, with every possible pair of values of two factors."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    cases = [case for case in itertools.product(*factors) if possible(*case)]
    missing, chosen = set().union(*map(pairs, cases)), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & pairs(case))))
        missing -= pairs(chosen[-1])
    return chosen


CASES = [
    (composed(*case), *case[3:])
    for case in pairwise(
        *(SOURCES, REFINERS, SEARCHES, LAYOUTS, INSTRUCTIONS), possible=composed
    )
]
METHODS = [*dict.fromkeys([*(name for name, *_ in CASES), *DISTINCT, *ALIKE])]
# The forms of block drafters: ours, DFlash2, DSpark, and one with a
# confidence head that decoding uses and no window. For the last one `markov` is the
# refiner of the heads, which are as many.
DRAFTERS = [
    {"markov_rank": 3, **sizes}
    for sizes in (
        {},
        {
            "reads_last_token": False,
            "guess_at_anchor": False,
            "num_layers": 2,
            "convolution_taps": 2,
            "convolution_group": 4,
            "markov_reads_state": True,
            "moving_window": True,
        },
        {
            "reads_last_token": False,
            "draft_vocabulary": None,
            "confidence": True,
            "confidence_reads_markov": True,
        },
        {"block_size": 4, "window": None, "confidence": True, "markov_rank": 0},
    )
]


def test_all_parts_and_aliases_are_covered():
    names = [*METHODS, "greedy", "auto"]
    methods = [parse_method(name) for name in names]
    named = {part.name for method in methods for part in method.all_parts}
    assert named == set(parts())
    kinds = {method.kind for method in methods}
    assert kinds >= {alias().kind for alias in ALIASES.values()}


@pytest.fixture(scope="module")
def make_decoder(instructions):
    """A function that makes a decoder of a random model with all assets."""

    @functools.cache
    def make(seed, block_size=4, mesh=None, int8=False, products=False, **trunk):
        model = make_model(
            seed, block_size, 14, **{"num_layers": 1, "max_length": 64, **trunk}
        )
        if int8:
            model = rounded_model(model, mesh, integer_products=products)
        elif mesh is not None:
            model = sharded_model(model, mesh)
        drafter = DRAFTERS[seed % len(DRAFTERS)]
        assets = make_assets(model, seed, drafter, feeds_normalised=seed % 2 == 1)
        return Decoder(model, width=3, assets=assets)

    return make


@pytest.fixture(autouse=True)
def _no_transfers(monkeypatch):
    """Drafters on the device decode without transfers to the host."""

    loop = generate.decode_on_device

    def guarded(*args):
        with jax.transfer_guard("disallow"):
            return loop(*args)

    monkeypatch.setattr(generate, "decode_on_device", guarded)


def check(decoder, name, prompts, options):
    """Decodes by a method and plainly; returns the tokens and the serial calls."""
    reference = decoder.decode(parse_method("greedy"), prompts, options)
    outputs = decoder.decode(parse_method(name), prompts, options, reference=reference)
    for got, want in zip(outputs, reference, strict=True):
        assert got.output_ids.tolist() == want.output_ids.tolist(), name
        assert got.accepted.sum() == len(got.output_ids)
        emitted = [
            token
            for draft, count in zip(got.drafts, got.accepted, strict=True)
            for token in draft[:count]
        ]
        assert emitted == got.output_ids.tolist()
    tokens = sum(len(g.output_ids) for g in outputs)
    return tokens, sum(g.serial_calls for g in outputs)


def check_all(make_decoder, name, examples=2, *, forms=1, **options):
    """Checks random models, prompts and lengths, with drafters of one or all forms.

    Models of a form share their compiled programs.
    """
    if name.startswith("ngram_fst"):
        pytest.importorskip("pynini")
    first = METHODS.index(name) if name in METHODS else 0
    step = 1 if forms > 1 else len(DRAFTERS)
    some = False
    for index in range(examples + 8):
        seed = first + index * step
        rng = np.random.default_rng(seed)
        # Prompts that are decoded alone are read by one program if they are alike.
        least = 17 if options.get("batch_size") == 1 else 1
        lengths = rng.integers(least, 25, 5)
        prompts = [rng.integers(0, 14, n).astype(np.int32) for n in lengths]
        fields = {"max_new_tokens": 16, "end_of_text": 0, "seed": seed, **options}
        tokens, serial = check(
            make_decoder(seed), name, prompts, DecodeOptions(**fields)
        )
        some |= serial < tokens
        if index + 1 >= examples and some:
            return
    # Random models accept little; none of any example would be a defect.
    raise AssertionError("no drafted token was accepted")


@pytest.mark.parametrize("name, layout, instructions", CASES, indirect=["instructions"])
def test_every_pair_of_parts_layouts_and_instructions(make_decoder, name, layout):
    check_all(make_decoder, name, **LAYOUTS[layout])


def test_cases_have_every_pair():
    assert len(CASES) < 1.3 * len(SOURCES) * len(SEARCHES)
    names = {name for name, *_ in CASES}
    assert all(
        any(name.startswith(source) and f"/{search}" in name for name in names)
        for source, search in itertools.product(SOURCES, SEARCHES)
        if composed(source, "", search)
    )
    pairs = set(itertools.product(LAYOUTS, INSTRUCTIONS))
    assert pairs == {tuple(rest) for _, *rest in CASES}


@pytest.mark.parametrize(
    "name", [*DISTINCT, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ALIKE)]
)
@pytest.mark.instructions("avx2")
def test_trees_in_a_batch(make_decoder, name):
    check_all(make_decoder, name, batch_size=5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.instructions("avx2")
def test_other_layouts(make_decoder, name, layout):
    options = LAYOUTS[layout]
    check_all(make_decoder, name, len(DRAFTERS), forms=len(DRAFTERS), **options)


@pytest.mark.exhaustive
@pytest.mark.instructions("avx2")
@pytest.mark.parametrize("name", ["ngram_device:3:adaptive=1", "block+ngram/best:3"])
def test_filtered_chains_drawn_alone(make_decoder, name):
    options = {"verification": BATCHED, "temperature": 0.9, "top_k": 9}
    check_all(make_decoder, name, 3, batch_size=1, **options)


# Other tests use the architecture of GPT-2.
LLAMA = {
    **random_models.LLAMA,
    "num_kv_heads": 1,
    "rotary": RotaryConfig(100.0, 1.0, "llama3", 8.0, 16),
    "tied_softmax": False,
}


# All further options of the transformer: Gemma's, and those of Granite, SmolLM3 and
# Qwen3-MoE.
GEMMA = {
    **LLAMA,
    "num_layers": 3,
    "experts": 4,
    "chosen_experts": 2,
    "query_key_norm": True,
    "norm_place": "both",
    "window": 6,
    "windowed_layers": (0, 1),
    "window_rotary": RotaryConfig(10.0),
    "unrotated_layers": (1,),
    "embedding_scale": 4.0,
    "attention_scale": 0.3,
    "attention_softcap": 2.0,
    "residual_scale": 0.7,
    "logit_softcap": 3.0,
}


# Rows of a whole number of blocks.
BLOCKS = {**LLAMA, "d_model": 32, "d_ff": 64, "int8": True}


OTHER_MODELS = {
    "markov-draft_vocabulary": ({"draft_vocabulary": 7}, "markov:3", 1),
    "two_heads": ({"block_size": 2}, "zero_gram:3", 1),
    "seven_heads": ({"block_size": 7}, "zero_gram:3", 1),
    "llama": (LLAMA, "medusa:8", 1),
    "gemma": (GEMMA, "block:3+neural/tree:6+lookup:4", 1),
    "int8": (BLOCKS, "medusa:8", 1),
    "int8-mesh": (BLOCKS, "block+ngram/tree:6:price=1.2", 8),
}


@pytest.mark.instructions("avx2")
@pytest.mark.parametrize(
    "fields, name, devices", OTHER_MODELS.values(), ids=OTHER_MODELS
)
def test_other_models(make_decoder, fields, name, devices):
    make = make_decoder if devices == 1 else sharded(make_decoder)
    check_all(lambda seed: make(seed, **fields), name, 2, batch_size=5)


@pytest.mark.parametrize(
    "fields, name, verification",
    [
        ({}, "zero_gram:4", BATCHED),
        (BLOCKS, "block:3+neural/tree:6+lookup:4", TREE),
        (GEMMA, "medusa:8", TREE),
    ],
    ids=["gpt2", "llama", "gemma"],
)
def test_integer_products(make_decoder, fields, name, verification):
    """Rounding activations to 8 bits turns the least difference into a whole step."""
    sizes = {"d_model": 32, "d_ff": 64, "int8": True, "products": True}

    def make(seed):
        decoder = make_decoder(seed, **{**fields, **sizes})
        assert decoder.model.precision == "int8"
        assert decoder.default_method.search == Tree(5, price=1.7)
        return decoder

    check_all(make, name, 2, batch_size=5, verification=verification)


def sharded(make_decoder):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    return functools.partial(make_decoder, mesh=mesh)


@pytest.mark.exhaustive
@pytest.mark.instructions("avx2")
@pytest.mark.parametrize("name", METHODS)
def test_eight_devices(make_decoder, name):
    """A few methods on eight devices are always in `meshes_test.py`."""
    check_all(sharded(make_decoder), name, 2, batch_size=5)


# Drafters with a memory of the text, in the order of what they remember: states of the
# trunk, of the drafters, of a rescorer and a draft model, counts, tokens.
REMEMBERING = [
    "bpd",
    "block/greedy",
    "block:3+neural/tree:6:min_prob=0.05+lookup:4",
    "eagle:3+neural/tree:8+lookup:5",
    "draft_model:2:drafts=2",
    "ngram_device:3:adaptive=1",
    "lookahead:3:order=3",
]


@pytest.mark.instructions("avx2")
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "name",
    [
        # The states of the trunk and of the block drafter alone.
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in REMEMBERING[:2]),
        *REMEMBERING[2:],
    ],
)
def test_drafts_do_not_depend_on_the_columns_that_are_read(
    make_decoder, name, devices, monkeypatch
):
    """Batches of short prompts beside a long one: a half or a quarter is read."""
    decoder = (make_decoder if devices == 1 else sharded(make_decoder))(7)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 14, n).astype(np.int32) for n in (3, 7, 14, 2, 30)]
    options = DecodeOptions(max_new_tokens=16, batch_size=1 if devices == 1 else 4)
    method = parse_method(name)
    monkeypatch.setattr(generate, "padded_length", lambda n: -(-n // 8) * 8)
    whole = decoder.decode(method, prompts, options)
    monkeypatch.setattr(generate, "_SHORTEST_READ", 8)
    read, run = [], decode_loop.run_prompts

    def counted(model, layers, prompts, columns):
        read.append(columns)
        return run(model, layers, prompts, columns)

    monkeypatch.setattr(decode_loop, "run_prompts", counted)
    parts = decoder.decode(method, prompts, options)
    # The first calls compile the programs.
    assert read[-5:] == [8, 8, 16, 8, 32] or devices == 8
    assert_same(parts, whole, "output_ids", "accepted", "proposed")


@pytest.mark.instructions("avx2")
def test_drawn_texts_do_not_depend_on_batch_layout_or_devices(make_decoder):
    """Speculative sampling: texts depend on seed, prompt and method only."""
    prompts = [np.arange(1, n, dtype=np.int32) for n in (4, 9, 2, 14, 6)]
    options = DecodeOptions(max_new_tokens=12, temperature=1.0, batch_size=5)
    options = dataclasses.replace(options, acceptance=SPECULATIVE)
    alone = dataclasses.replace(options, batch_size=1, verification=BATCHED)
    seeded = dataclasses.replace(options, seed=1)
    outputs = [
        make(5).decode(parse_method("medusa:8"), prompts, chosen)
        for make, chosen in (
            (make_decoder, options),
            (make_decoder, alone),
            (sharded(make_decoder), options),
            (make_decoder, seeded),
        )
    ]
    texts = [[g.output_ids.tolist() for g in output] for output in outputs]
    assert texts[0] == texts[1] == texts[2] != texts[3]
    assert sum(g.serial_calls for g in outputs[0]) < 5 * 12


@pytest.mark.instructions("avx2")
def test_bfloat16_texts_are_compared_and_their_differences_explained(make_decoder):
    """In bfloat16 drafts may change the text, where two tokens are nearly as likely.

    Texts need not differ, but where they do the comparison must report it.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 14, n).astype(np.int32) for n in [3, 9, 17, 24] * 4]
    decoder = make_decoder(2, dtype="bfloat16")
    options = DecodeOptions(max_new_tokens=32, batch_size=16)
    reference = decoder.decode(parse_method("greedy"), prompts, options)
    outputs = decoder.decode(parse_method("medusa:8"), prompts, options)
    text_differences = differences(decoder.model, reference, outputs)
    by_prompt = {difference.prompt_index: difference for difference in text_differences}
    assert sum(len(g.output_ids) for g in reference) == 16 * 32
    for index, (a, b) in enumerate(zip(reference, outputs, strict=True)):
        position = first_difference(a.output_ids, b.output_ids)
        assert (position is None) == (index not in by_prompt)
        if position is not None:
            assert by_prompt[index].position == position
            # bfloat16 has 8 bits: equal up to the rounding of a few of them.
            assert by_prompt[index].gap < 0.1
