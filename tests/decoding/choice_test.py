import jax.numpy as jnp
import numpy as np

from bpd_jax.decoding.choice import choose, row_keys
from bpd_jax.decoding.options import StepOptions

SAMPLING = StepOptions(temperature=1.0)


def test_greedy_takes_the_best():
    logits = jnp.array([[[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]])
    keys = row_keys(0, jnp.array([0]))
    assert choose(logits, jnp.array([[4, 5]]), keys, StepOptions()).tolist() == [[1, 0]]


def test_samples_follow_the_softmax():
    logits = np.log([0.5, 0.3, 0.2])
    count = 20_000
    keys = row_keys(1, jnp.array([0]))
    positions = jnp.arange(count)[None]
    for temperature in (1.0, 0.5):
        drawn = choose(
            jnp.broadcast_to(jnp.asarray(logits), (1, count, 3)),
            positions,
            keys,
            StepOptions(temperature=temperature),
        )
        want = np.exp(logits / temperature)
        want /= want.sum()
        share = np.bincount(np.asarray(drawn)[0], minlength=3) / count
        # Four standard deviations of a share.
        np.testing.assert_allclose(share, want, atol=4 * 0.5 / np.sqrt(count))


def test_the_draw_depends_on_row_and_position_alone():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 1, 1000)))
    one = choose(logits, jnp.array([[7]]), row_keys(3, jnp.array([5])), SAMPLING)
    many = choose(
        jnp.broadcast_to(logits, (3, 4, 1000)),
        jnp.array([[1, 7, 7, 2]] * 3),
        row_keys(3, jnp.array([4, 5, 6])),
        SAMPLING,
    )
    assert many[1, 1] == many[1, 2] == one[0, 0]
    assert many[1, 0] != one[0, 0]
    assert many[0, 1] != one[0, 0]
