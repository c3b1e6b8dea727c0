"""Readings of the sizes that the paper prints in its Table 6."""

import pathlib
import re

import pytest

from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.parameters import count_parameters
from bpd_jax.models.transformer_config import TransformerConfig
from experiments.printed import TABLE6

ROOT = pathlib.Path(__file__).parent.parent.parent
NAMED = {"1.5B": 1.5e9, "32M": 32e6, "61M": 61e6, "94M": 94e6}


def deviations(*, gated: bool, head_dim: int | None) -> dict[str, float]:
    """Parameters over those that the names of the models say, minus 1, in percent."""
    percentages = {}
    for name, sizes in TABLE6.items():
        trunk = TransformerConfig(
            50257,
            int(sizes["layers"]),
            int(sizes["embedding"]),
            int(sizes["hidden"]),
            num_heads=12,
            head_dim=head_dim,
            gated=gated,
        )
        heads = None
        if name == "1.5B":
            heads = BlockHeadsConfig(9, hidden=trunk.d_ff)
        count = count_parameters(BlockwiseConfig(trunk, heads))["total"]
        percentages[name] = 100 * (count / NAMED[name] - 1)
    return percentages


def test_wider_heads_would_also_fit():
    """A plain 1.5B model with heads of twice the printed width (docs/training.md)."""
    trunk = TransformerConfig(50257, 18, 1536, 12288, num_heads=12)
    config = BlockwiseConfig(trunk, BlockHeadsConfig(9, hidden=24576))
    assert count_parameters(config)["total"] == 1_534_348_800


@pytest.mark.parametrize(
    ("gated", "head_dim", "percent"),
    [
        (False, None, {"1.5B": -17.8, "32M": -26.1, "61M": -32.2, "94M": -12.0}),
        (False, 128, {"1.5B": -17.8, "32M": -15.1, "61M": 2.7, "94M": 3.1}),
        (True, None, {"1.5B": 4.8, "32M": -22.4, "61M": -20.5, "94M": 3.1}),
        (True, 128, {"1.5B": 4.8, "32M": -11.4, "61M": 14.3, "94M": 18.1}),
    ],
)
def test_no_reading_fits_all_models(gated, head_dim, percent):
    """Hence the large model is read with a gate, and rescorers without one."""
    percentages = deviations(gated=gated, head_dim=head_dim)
    assert percentages == pytest.approx(percent, abs=0.06)
    assert max(map(abs, percentages.values())) > 10
    # The page on training has the same numbers in its table.
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    reading = f"| {'gated' if gated else 'plain'} | {head_dim or 'width / 12'} |"
    (row,) = [line for line in page.splitlines() if line.startswith(reading)]
    printed = re.findall(r"\(([+−][\d.]+) %\)", row)
    order = ("1.5B", "94M", "61M", "32M")
    assert printed == [f"{percentages[name]:+.1f}".replace("-", "−") for name in order]
