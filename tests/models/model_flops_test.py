from bpd_jax.models.blockwise_config import BlockHeadsConfig, BlockwiseConfig
from bpd_jax.models.model_flops import serial_call_flops, train_flops
from bpd_jax.models.transformer_config import TransformerConfig

MODEL = BlockwiseConfig(
    TransformerConfig(500, 2, 64, 256, num_heads=4, max_length=128, gated=True),
    BlockHeadsConfig(num_heads=3, hidden=128),
)


def test_flops_of_a_step_by_hand():
    trunk = 2 * (4 * 64 * 64 + 3 * 64 * 256)
    heads = 2 * (2 * 64 * 128)
    softmax = 3 * 500 * 64
    attention = 2 * 2 * 2 * 128 * 128 * 64  # two layers; scores and values
    expected = 6 * (trunk + heads + softmax) * 8 * 128 + 3 * 8 * attention
    assert train_flops(MODEL, 8, 128) == expected
    # Heads 2 and 3 at 32 positions of each row.
    later = heads + 2 * 500 * 64
    expected -= 6 * later * 8 * (128 - 32)
    assert train_flops(MODEL, 8, 128, 32) == expected


def test_flops_of_a_serial_call_by_hand():
    trunk = 2 * (4 * 64 * 64 + 3 * 64 * 256)
    row = 2 * 20 * (trunk + 500 * 64) + 2 * 2 * 2 * 20 * 96 * 64
    row += 2 * (2 * (2 * 64 * 128) + 2 * 500 * 64)
    assert serial_call_flops(MODEL, 4, 20, 96) == 4 * row
