"""The words of the page of all studies, explained."""

from bpd_jax.reporting.wording import DEFINITIONS

TERMS = {
    "Blockwise parallel decoding (BPD)": (
        "Heads on one model guess the next L tokens at once. The model checks the "
        "guess in one pass, and keeps what it would have written itself, so that the "
        "text is that of plain greedy decoding. Here BPD also names drafts as the "
        "heads give them, unrefined."
    ),
    "Serial call": DEFINITIONS["Serial call"],
    "Block efficiency (BE)": (
        "Decoded tokens divided by serial calls: 1 for greedy decoding, at most the "
        "number of heads L."
    ),
    "Lattice": (
        "The k best candidates of every head at one position. Every way through it, "
        "one candidate of each head, is a possible draft."
    ),
    "Refinement": (
        "Choosing a better draft from the lattice by a second, small model of text."
    ),
    "n-gram, neural, tree": (
        "What refines, and what is checked. n-gram: counts of neighbouring tokens "
        "score whole drafts. Neural: a small transformer scores one token after the "
        "other. Tree: drafts that share their beginnings are checked as one."
    ),
    "1-best, p-best": (
        "How many drafts of the lattice the model checks in one call: the best one, "
        "or the p best, of which the one that is right furthest counts."
    ),
    "alpha": (
        "The weight of the second model's scores beside those of the heads; 0 leaves "
        "the heads alone, which is what 0-gram stands for."
    ),
    "Oracle": (
        "The longest way through the lattice that the text takes: no draft from it "
        "can be right further."
    ),
    "Headroom taken": (
        "How much of the way from BPD to the oracle a method goes: its BE minus that "
        "of BPD, divided by the oracle's minus that of BPD."
    ),
}
"""Terms that the page uses, in an order in which each needs only those before it."""
