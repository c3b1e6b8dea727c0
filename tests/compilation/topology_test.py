import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.compilation import gpus, topology
from bpd_jax.compilation.chips import CHIPS
from bpd_jax.compilation.measured_program import out_of_memory
from bpd_jax.compilation.topology import find_slice
from tests.compilation.compilers import NEEDS_LIBTPU


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "v9:2x2",
            r"v9:2x2 is not known: give a chip \(v4, v4-megacore, .*, h100, h200\)",
        ),
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
    with pytest.raises(UserError, match="--slices=0 must be 1 or more"):
        find_slice("v5e:2x2", 0)


def test_missing_libtpu_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"libtpu, is not installed.*make tpu-compile"):
        find_slice("v4:4x4x4")


def test_missing_gpu_compiler_is_reported_with_the_remedy(monkeypatch):
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"CUDA, is not installed.*make gpu-compile"):
        find_slice("h100:8")
    with pytest.raises(UserError, match="--slices=2 is more than one host"):
        find_slice("h100:8", 2)


def test_every_gpu_has_a_target():
    """Its text contains what the chip's table says."""
    chips = [chip for chip in CHIPS.values() if chip.gpu]
    assert {chip.name for chip in chips} == {"a100", "h100", "h200"}
    for chip in chips:
        text = gpus.target(chip)
        assert f"memory_bandwidth: {int(chip.hbm)}\n" in text
        major, minor = chip.gpu.split(".")
        assert f"major: {major} minor: {minor}" in text
        assert text.count("{") == text.count("}") == 3


@NEEDS_LIBTPU
def test_slices_have_the_cores_of_their_chips():
    cores = {"v4": 8, "v4-megacore": 4, "v5p": 4, "v5e": 4, "v6e": 4}
    for name, chip in CHIPS.items():
        if chip.gpu:
            continue
        sides = "x".join(["2", "2", "1"][: chip.dimensions])
        assert len(find_slice(f"{name}:{sides}").devices) == cores[name]
    with pytest.raises(UserError, match="v4:3x5x7 is not supported by the TPU"):
        find_slice("v4:3x5x7")


@pytest.mark.parametrize(
    "message, expected",
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (512.00G) exceeds available HBM (15.75G).",
            "it needs 512.00 GiB of the 15.75 GiB of a core",
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
            "memory space hbm. Used 700.5M of 15.25M hbm. Exceeded hbm capacity by 1M.",
            "it needs 700.5 MiB of the 15.25 MiB of a core",
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", None),
        ("INVALID_ARGUMENT: no", None),
    ],
)
def test_out_of_memory_messages_are_parsed(message, expected):
    assert out_of_memory(message) == expected
