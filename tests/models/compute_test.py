import pytest

from bpd_jax.errors import UserError
from bpd_jax.models.compute import ComputeConfig


@pytest.mark.parametrize(
    "change, message",
    [
        ({"attention": "flash"}, "attention must be one of auto, xla, cudnn, pallas"),
        ({"remat": "some"}, "remat must be one of none, dots, full"),
        ({"loss_chunk": 0}, "loss_chunk must be a positive integer, not 0"),
        ({"accumulate": None}, "accumulate must be a positive integer, not None"),
        ({"accumulate": True}, "accumulate must be a positive integer, not True"),
        ({"scan_layers": 1}, "scan_layers must be True or False, not 1"),
    ],
)
def test_bad_choices_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        ComputeConfig(**change)
