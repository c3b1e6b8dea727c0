"""Loading parameters: types and peak memory."""

import pathlib
import tracemalloc
import weakref

import jax
import numpy as np

from bpd_jax.decoding.pretrained_checkpoint import load_trunk
from bpd_jax.formats.huggingface import open_folder
from bpd_jax.formats.trunk_layouts import llama_layout
from bpd_jax.models.transformer_config import TransformerConfig
from tests.decoding.random_models import LLAMA

GOLDEN = pathlib.Path(__file__).parent / "golden"


class CountingTensors:
    """Makes every tensor when it is requested, and counts those still alive."""

    def __init__(self, layout, dtype=np.float32):
        self.shapes = {origin.name: origin.shape for origin in layout.values()}
        self.dtype = dtype
        self.largest = 0
        self.made = []
        self.most_alive = 0

    def read(self, name):
        alive = sum(made() is not None for made in self.made)
        self.most_alive = max(self.most_alive, alive + 1)
        tensor = np.full(self.shapes[name], len(self.made), self.dtype)
        self.made.append(weakref.ref(tensor))
        self.largest = max(self.largest, tensor.nbytes)
        return tensor


def test_one_tensor_is_loaded_at_a_time():
    config = TransformerConfig(3000, 2, 96, 256, 4, 2, tied_softmax=False, **LLAMA)
    layout = llama_layout(config)
    load_trunk(config, layout, CountingTensors(layout))  # imports, caches
    tensors = CountingTensors(layout)
    tracemalloc.start()
    try:
        params = load_trunk(config, layout, tensors)
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tensors.most_alive == 1
    # On CPU devices, which may keep the arrays that they were given, the peak is one
    # tensor and one copy of it above the parameters.
    assert peak - current < 2.2 * tensors.largest
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert num_bytes > 2.2 * tensors.largest


def test_parameters_do_not_alias_the_file(tmp_path):
    """A device may keep the array that it is given, which must not be a memory map."""
    path = tmp_path / "model.safetensors"
    for file in (GOLDEN / "llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoint = open_folder(tmp_path)
    params = load_trunk(checkpoint.config, checkpoint.layout, checkpoint.tensors)
    before = jax.device_get(jax.tree.map(np.array, params))
    with path.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))
    jax.tree.map(np.testing.assert_array_equal, params, before)
