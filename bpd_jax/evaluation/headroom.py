"""How much of what could be gained was gained."""


def headroom_taken(efficiency: float, base: float, oracle: float) -> float | None:
    """Share of the oracle's headroom: (BE - BE of BPD) / (BE of the oracle - BPD's).

    >>> headroom_taken(1.75, base=1.5, oracle=2.5)
    0.25

    Args:
      efficiency: block efficiency of a method.
      base: BPD's.
      oracle: of the oracle over the lattice that the method chooses from, in the paper
        k = 16.

    Returns:
      1 for the oracle itself, negative below BPD; None where the oracle gains nothing.
    """
    if oracle <= base:
        return None
    return (efficiency - base) / (oracle - base)
