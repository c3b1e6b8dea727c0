"""Reads an automaton from standard input with OpenFst, and writes it as an `.npz`.

A program of its own, without the rest of bpd_jax: OpenFst ends the process that reads a
damaged file.
"""

import io
import sys

import numpy as np


def main() -> None:
    """Writes `start`, `finals`, `arcs` (source, label, target), `weights`, names."""
    import pynini

    fst = pynini.Fst.read_from_string(sys.stdin.buffer.read())
    if fst.arc_type() != "standard":
        sys.exit(f"its arcs are of the type {fst.arc_type()}")
    if not fst.verify():
        sys.exit("its states and arcs do not fit together")
    if not fst.properties(pynini.ACCEPTOR, True) & pynini.ACCEPTOR:
        sys.exit("an arc has different input and output labels")
    arcs, weights, finals = [], [], []
    for state in fst.states():
        finals.append(float(fst.final(state)))
        for arc in fst.arcs(state):
            arcs.append((state, arc.ilabel, arc.nextstate))
            weights.append(float(arc.weight))
    symbols = fst.input_symbols() or ()
    output = io.BytesIO()
    np.savez(
        output,
        start=fst.start(),
        finals=np.array(finals, np.float32),
        arcs=np.array(arcs, np.int64).reshape(-1, 3),
        weights=np.array(weights, np.float32),
        labels=np.array([label for label, _ in symbols], np.int64),
        names=np.array([name for _, name in symbols], str),
    )
    sys.stdout.buffer.write(output.getvalue())


if __name__ == "__main__":
    main()
