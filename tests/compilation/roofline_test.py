import dataclasses
from collections import Counter

import pytest

from bpd_jax.compilation.chips import Chip
from bpd_jax.compilation.collectives import Collective
from bpd_jax.compilation.costs import Costs
from bpd_jax.compilation.roofline import (
    link_bytes,
    link_seconds,
    network_bytes,
    roofline,
)

# Two cores a chip; 4 × 4 chips; sides of 4 close to rings, those of 2 do not.
CHIP = Chip("x", 2, flops=200.0, hbm=20.0, usable=1, link=1.0, dimensions=2, wraps=4)
SIDES = (4, 4)
# Core c of chip (x, y) is device 2 · (4 · y + x) + c.
PLACES = [(x, y, 0) for y in range(4) for x in range(4) for _ in range(2)]


def exchange(*group, nbytes=8, kind="collective-permute"):
    return Collective(kind, nbytes, 0, (group,), "1")


@pytest.mark.parametrize(
    "group, sides, seconds",
    [
        # One core of each of four chips along a ring: both cores of a chip send 8
        # bytes over its two links.
        ((0, 2, 4, 6), SIDES, 8 * 2 / 2),
        # Both cores of these chips: the chip receives once.
        ((0, 1, 2, 3, 4, 5, 6, 7), SIDES, 8 * 1 / 2),
        # Along both sides: four links.
        (tuple(range(32)), SIDES, 8 * 1 / 4),
        # Half of a ring is a line.
        ((0, 2), SIDES, 8 * 2 / 1),
        # A line of two chips has one link between them.
        ((0, 2), (2, 4), 8 * 2 / 1),
        # The two cores of one chip.
        ((0, 1), SIDES, 0),
    ],
)
def test_time_of_a_collective(group, sides, seconds):
    assert link_seconds(exchange(*group), CHIP, sides, PLACES) == seconds


def test_longest_of_compute_memory_and_links_is_the_bound():
    ring, inside = exchange(0, 2, 4, 6), exchange(0, 1)
    costs = Costs(flops=600, other_bytes=50, collectives=Counter({ring: 3, inside: 9}))
    estimate = roofline(costs, CHIP, SIDES, PLACES)
    assert (estimate.compute, estimate.memory, estimate.links) == (6, 5, 24)
    assert (estimate.seconds, estimate.bound) == (24, "links")
    assert link_bytes(costs, PLACES) == 3 * 8
    assert roofline(costs, CHIP, SIDES, [(0, 0, 0)] * 32).bound == "compute"


@pytest.mark.parametrize(
    "kind, sent",
    [
        ("ALL_REDUCE", 2 * 100 * 3 / 4),
        ("REDUCE_SCATTER", 100 * 3 / 4),
        ("ALL_GATHER", 100 * 3),
        ("ONE_TO_ONE", 100),
    ],
)
def test_time_of_the_network_between_slices(kind, sent):
    costs = Costs(flops=600, network=Counter({kind: 100}))
    assert network_bytes(costs, 4) == sent
    # Two cores share what a chip can send.
    chip = dataclasses.replace(CHIP, network=4.0)
    estimate = roofline(costs, chip, SIDES, PLACES, 4)
    assert estimate.network == sent / 2
    assert (estimate.seconds, estimate.bound) == (sent / 2, "network")
    # A network of unknown speed is ignored.
    assert roofline(costs, CHIP, SIDES, PLACES, 4).network == 0
