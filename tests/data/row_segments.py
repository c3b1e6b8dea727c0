"""The segments of packed rows, which tests compare with expected ones."""

from bpd_jax.data.rows import PackedRows


def segments(rows: PackedRows) -> list[tuple[list[int], list[bool]]]:
    """Returns the tokens and the loss mask of every segment of all rows, sorted."""
    result = []
    batch = rows.batch(slice(None))
    for tokens, ids, mask in zip(
        batch.tokens, batch.segment_ids, batch.loss_mask, strict=True
    ):
        assert not mask[ids == 0].any()
        for number in range(1, ids.max() + 1):
            segment = ids == number
            result.append((tokens[segment].tolist(), mask[segment].tolist()))
    return sorted(result)
