import importlib.util

import pytest

from bpd_jax.base.chips import CHIPS, device_count
from bpd_jax.base.errors import UserError
from bpd_jax.compilation.compiler import find_slice, gpu_target
from tests.compilation.compilers import NEEDS_LIBTPU


@pytest.mark.parametrize(
    "name, message",
    [
        ("v9:2x2", r"v9:2x2 is not known: give a chip \(v4, .*, h100, h200\)"),
        ("v4", "v4 must give the 3 dimensions of a slice, .* v4:4x4x4"),
        ("v4:4xx4", "must give the 3 dim"),
        ("v5e:4x4x4", "v5e:4x4x4 must give the 2 dimensions .* v5e:4x4"),
        ("h100", "h100 must give the number of GPUs .* h100:4"),
        ("h100:2x4", "h100:2x4 must give the number of GPUs"),
        ("h100:16", "h100:16 .* more than one host"),
    ],
)
def test_invalid_slices_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        find_slice(name)
    for name, slices in (("v5e:2x2", 0), ("h100:8", 2)):
        with pytest.raises(UserError, match=f"--slices={slices} "):
            find_slice(name, slices)


@pytest.mark.parametrize(
    "name, message",
    [
        ("v4:4x4x4", r"libtpu, is not installed.*make tpu-compile"),
        ("h100:8", r"CUDA, is not installed.*make gpu-compile"),
    ],
)
def test_a_missing_compiler_is_reported_with_the_remedy(monkeypatch, name, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        find_slice(name)


def test_every_gpu_has_a_target():
    """Its text contains what the chip's table says."""
    chips = [chip for chip in CHIPS.values() if chip.gpu]
    assert {chip.name for chip in chips} == {"l4", "a100", "h100", "h200"}
    for chip in chips:
        text = gpu_target(chip)
        assert f"memory_bandwidth: {int(chip.hbm)} " in text
        major, minor = chip.gpu.split(".")
        assert f"major: {major} minor: {minor}" in text
        assert text.count("{") == text.count("}") == 3


@NEEDS_LIBTPU
def test_slices_have_the_cores_of_their_chips():
    for name, chip in CHIPS.items():
        if chip.gpu:
            continue
        sides = "x".join(["2", "2", "1"][: chip.dimensions])
        topology = f"{name}:{sides}"
        assert len(find_slice(topology).devices) == device_count(topology)
    with pytest.raises(UserError, match="v4:3x5x7 is not supported by the TPU"):
        find_slice("v4:3x5x7")
