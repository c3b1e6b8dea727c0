"""Lengths that texts are padded to, so that few shapes are compiled."""

_STEP = 32


def padded_length(length: int, per_octave: int = 8, shortest: int = _STEP) -> int:
    """The smallest of few lengths that is at least `length`; all are multiples of 32.

    Between a number and its double there are at most `per_octave` of them.

    >>> [padded_length(n) for n in (1, 33, 500, 520, 1000, 1100)]
    [32, 64, 512, 576, 1024, 1152]
    >>> [padded_length(n, per_octave=2) for n in (1, 65, 97, 150, 1000)]
    [32, 96, 128, 192, 1024]
    """
    power = 1 << max(length - 1, 0).bit_length()
    step = max(_STEP, power // (2 * per_octave))
    return max(-(-length // step) * step, shortest)
