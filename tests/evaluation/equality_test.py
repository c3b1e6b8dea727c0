import dataclasses

import numpy as np
import pytest

from bpd_jax.decoding.generate import Generation
from bpd_jax.decoding.methods import Method
from bpd_jax.evaluation.compare import MethodResult
from bpd_jax.evaluation.efficiency import block_efficiency, bootstrap_interval
from bpd_jax.evaluation.equality import Difference, differences, first_difference


def generation(output, calls=1):
    return Generation(
        input_ids=np.array([1, 2]),
        output_ids=np.array(output),
        serial_calls=calls,
        seconds=0.5,
        drafts=np.zeros((calls, 1)),
        accepted=np.ones(calls),
        ranks=np.zeros(calls),
    )


@dataclasses.dataclass(frozen=True)
class FlatModel:
    """A model whose two best logits are `gap` apart everywhere."""

    gap: float

    def forward(self, params, tokens, positions, mask, cache=None):
        return np.zeros((*tokens.shape, 1)), None

    def next_token_logits(self, params, hidden):
        return np.array([0.0, -1.0, 5.0, 5.0 - self.gap])


def test_first_difference():
    assert first_difference(np.array([1, 2]), np.array([1, 2])) is None
    assert first_difference(np.array([1, 2, 3]), np.array([1, 9, 3])) == 1
    assert first_difference(np.array([1]), np.array([1, 9])) == 1


@pytest.mark.parametrize("gap, near", [(1e-6, True), (0.5, False)])
def test_a_difference_is_found_and_a_near_tie_told_apart(gap, near):
    reference = [generation([5, 6, 7]), generation([5, 6, 7])]
    other = [generation([5, 6, 7]), generation([5, 8, 7])]
    [found] = differences(FlatModel(gap), {}, reference, other)
    assert (found.prompt_index, found.position) == (1, 1)
    assert found.gap == pytest.approx(gap)
    assert found.near_tie is near
    result = MethodResult(Method("bpd"), "BPD", other, [found])
    assert result.errors == ([] if near else [found])


def test_equal_outputs_have_no_difference():
    texts = [generation([5, 6]), generation([])]
    assert differences(FlatModel(0.0), {}, texts, texts) == []


def test_block_efficiency_is_a_ratio_of_sums():
    texts = [generation([1] * 8, calls=2), generation([1] * 2, calls=2)]
    assert block_efficiency(texts) == 10 / 4
    low, high = bootstrap_interval(texts)
    assert low == 1.0
    assert high == 4.0
    assert bootstrap_interval([texts[0]] * 5) == (4.0, 4.0)


def test_an_error_ends_the_run_loudly(tmp_path):
    from bpd_jax.errors import UserError
    from bpd_jax.evaluate import _fail_on_errors

    wrong = MethodResult(
        Method("bpd"), "BPD", [generation([1])], [Difference(0, 3, 0.7)]
    )
    with pytest.raises(UserError, match=r"NOT LOSSLESS: BPD .* prompt 1 at token 4"):
        _fail_on_errors([wrong], tmp_path)
    tie = MethodResult(Method("bpd"), "BPD", [generation([1])], [Difference(0, 3, 0)])
    _fail_on_errors([tie], tmp_path)
