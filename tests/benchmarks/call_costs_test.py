"""Costs of calls, which the benchmarks report."""

import pytest

from benchmarks.call_costs import PassCosts, measure_drafting, measure_passes
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.models.mesh import MeshConfig, make_mesh
from tests.decoding.random_models import make_model, make_prompts, sharded_model


@pytest.fixture(scope="module")
def prompts():
    return make_prompts([3, 17])


def test_costs_are_interpolated_and_extrapolated_linearly():
    """Measured at 1, 2 and 4, with slope 1/2, and at 8, with slope 1."""
    costs = PassCosts({1: 1.0, 2: 1.5, 4: 2.5, 8: 6.5})
    found = [costs.at(nodes) for nodes in (1, 2, 4, 5, 8, 12)]
    assert found == pytest.approx([1.0, 1.5, 2.5, 3.5, 6.5, 10.5])
    assert PassCosts({4: 2.5}).at(9) == 2.5


def test_drafting_is_timed_without_the_gate_of_drafts(prompts, monkeypatch):
    decoder = Decoder(make_model(3, num_layers=1, vocab_size=16), width=4)
    tasks, task = [], decoder.task

    def recorded(*arguments):
        tasks.append(task(*arguments))
        return tasks[-1]

    monkeypatch.setattr(decoder, "task", recorded)
    for text in ("heads/tree:3:price=1.5", "heads/tree:3"):
        assert measure_drafting(decoder, parse_method(text), prompts[0], 1) > 0
    assert tasks[0].drafter == tasks[1].drafter


def test_costs_are_measured_on_a_mesh(prompts):
    """Two rows become four."""
    model = make_model(3, num_layers=1, vocab_size=16)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    decoder = Decoder(sharded_model(model, mesh), width=4)
    assert measure_passes(decoder, 4, 8, [1, 2]).seconds[2] > 0
    assert measure_drafting(decoder, parse_method("bpd"), prompts[0], 2) > 0
