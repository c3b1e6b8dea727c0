"""Decoding on meshes of eight devices: texts, and where arrays are."""

import dataclasses
import pathlib
import re

import jax
import numpy as np
import pytest

from bpd_jax.decoding.decode_loop import decode_on_device
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.drafting.interface import without_arrays
from bpd_jax.evaluation.scoring import score_texts
from bpd_jax.models.mesh import MeshConfig, make_mesh
from tests.decoding.random_models import make_assets, make_model, sharded_model

GOLDEN = pathlib.Path(__file__).parent.parent / "formats" / "golden"

# Data, fsdp, model. With model = 8 no axis of the cache is even.
MESHES = [(8, 1, 1), (2, 2, 2), (1, 8, 1), (2, 1, 4), (1, 1, 8)]

# On the device with tables, on the host, with an argument for every row, and with
# caches of drafters.
FEW = [
    "ngram_viterbi:4",
    "ngram_device:3:adaptive=1",
    "block+markov/tree:6",
    "eagle:2",
    "oracle",
]
# `lossless_test.py` has all others on one of the meshes.
METHODS = ["greedy", *FEW, "draft_model:2:drafts=2", "lookahead:3:order=3"]


@pytest.fixture(scope="module")
def decoder_on():
    model = make_model(2, 4, 14, num_layers=2, max_length=64, num_heads=4)
    assets = make_assets(model)

    def make(mesh):
        on_mesh = model
        if mesh is not None:
            sizes = dict(zip(("data", "fsdp", "model"), mesh, strict=True))
            on_mesh = sharded_model(model, make_mesh(MeshConfig(**sizes)))
        return Decoder(on_mesh, width=3, assets=assets)

    return make


def prompts_of(count):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 14, 2 + n % 7).astype(np.int32) for n in range(count)]


def check(decoder_on, mesh, name, batch_size, **options):
    prompts = prompts_of(max(batch_size, 5))
    chosen = DecodeOptions(max_new_tokens=10, batch_size=batch_size, **options)
    method = parse_method(name)
    plain = decoder_on(None).decode(GREEDY, prompts, chosen)
    one = decoder_on(None).decode(method, prompts, chosen, reference=plain)
    many = decoder_on(mesh).decode(method, prompts, chosen, reference=plain)
    for reference, single, text in zip(plain, one, many, strict=True):
        assert text.output_ids.tolist() == reference.output_ids.tolist()
        assert text.accepted.tolist() == single.accepted.tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_texts_are_those_of_one_device(decoder_on, mesh, name, batch_size):
    check(decoder_on, mesh, name, batch_size)


@pytest.mark.parametrize("name", FEW)
def test_texts_of_half_of_the_heads_are_those_of_one_device(decoder_on, name):
    """Five prompts in a batch of eight, that is two on each of four groups."""
    check(decoder_on, (2, 2, 2), name, 5)


GATHERED = re.compile(r" = \w+\[([\d,]*)\]\S* all-gather\(")


@pytest.mark.parametrize(
    "name",
    [
        "block/tree:6",
        "eagle:2",
        pytest.param("draft_model:2", marks=pytest.mark.exhaustive),
    ],
)
def test_rows_heads_and_parameters_are_spread(decoder_on, name):
    """Also those of drafters' caches, none of which is gathered."""
    decoder = decoder_on((2, 2, 2))
    options = DecodeOptions(max_new_tokens=20, batch_size=8)
    task = decoder.task(parse_method(name), options)
    state = task.prefill(prompts_of(8), range(8), 8, 4)
    static = without_arrays(task.drafter)
    arguments = task.model, task.weights, static, state, options.step
    program = decode_on_device.lower(*arguments).compile()
    gathered = GATHERED.findall(program.as_text())
    assert gathered  # Of parameters over `fsdp`, of candidates over `model`.
    # Keys and values of a cache have four axes.
    assert not [shape for shape in gathered if shape.count(",") == 3]
    for held in (state, task.run(state, 1)):
        for array in jax.tree.leaves(dataclasses.replace(held, history=None)):
            rows, *others = array.sharding.shard_shape(array.shape)
            assert rows == 2
            if array.ndim == 4:  # Keys and values of a cache; EAGLE's has one head.
                assert others[0] == max(array.shape[1] // 2, 1)
    embedding = decoder.model.params["trunk"]["embedding"]
    assert embedding.sharding.shard_shape(embedding.shape) == (7, 8)
    assert all(x.sharding.mesh.size == 8 for x in jax.tree.leaves(task.weights))
    assert task.replicated_bytes > 1000


def test_parameters_go_from_files_to_their_devices(trained):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    for path in (trained / "run", GOLDEN / "llama"):
        one, many = load_model(str(path)), load_model(str(path), mesh=mesh)
        jax.tree.map(np.testing.assert_array_equal, one.params, many.params)
        assert one.fingerprint == many.fingerprint
        embedding = many.params["trunk"]["embedding"]
        rows, width = embedding.sharding.shard_shape(embedding.shape)
        assert (2 * rows, 2 * width) == embedding.shape
        if one.config.heads is not None:
            [*kernels] = jax.tree.leaves(many.params["heads"])
            assert all(x.sharding.mesh == mesh for x in kernels)


def test_scores_are_those_of_one_device(decoder_on):
    texts = [(prompt, 1) for prompt in prompts_of(5)]
    one, many = (
        dict(score_texts(decoder_on(mesh).model, texts, batch_size=5))
        for mesh in (None, (2, 2, 2))
    )
    for index, score in one.items():
        assert many[index].log_prob == pytest.approx(score.log_prob, abs=1e-4)
