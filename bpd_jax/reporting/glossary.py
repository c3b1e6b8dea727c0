"""Explanations of terms on the pages; each uses only the terms before it."""

_CALL = (
    "One pass of the model in the decode loop, which verifies a complete draft. The "
    "pass over the prompt is not counted."
)
_EFFICIENCY = (
    "Decoded tokens divided by serial calls: 1 for greedy decoding, at most the length "
    "of a draft, which is L for L heads. Intervals are bootstrap intervals."
)

DEFINITIONS = {
    "Serial call": _CALL,
    "Block efficiency": _EFFICIENCY,
    "Gain over BPD": (
        "Block efficiency divided by that of blockwise parallel decoding with "
        "independent heads (BPD), minus one. Paired bootstrap interval over prompts."
    ),
    "Output": (
        "Comparison with plain greedy decoding, token by token. Near-tie: at the first "
        "difference, the model's two best tokens are equal up to rounding."
    ),
    "Wall time": "Seconds for all prompts, without compilation; median over rounds.",
    "Speed-up": (
        "Wall time of greedy decoding divided by that of the method: the median of the "
        "ratios within a round."
    ),
}
"""Terms of the page of an evaluation."""

TERMS = {
    "Blockwise parallel decoding (BPD)": (
        "Heads of one model predict the next L tokens at once. The model verifies this "
        "draft in one pass and accepts the longest prefix that it would have generated "
        "itself. BPD also denotes the unrefined drafts of the heads."
    ),
    "Serial call": _CALL,
    "Block efficiency (BE)": _EFFICIENCY,
    "Lattice": (
        "The k best candidates of every head at one position. Every path through it, "
        "with one candidate of each head, is a possible draft."
    ),
    "Refinement": (
        "Selecting a better draft from the lattice with a small language model: an "
        "n-gram model scores complete drafts, a neural one a token after another."
    ),
    "1-best, p-best, tree": (
        "Drafts that the model verifies in one call: the best one, the p best, or all "
        "paths of a tree. The one with the most accepted tokens counts."
    ),
    "alpha": (
        "The weight of the rescorer's scores relative to those of the heads; with 0 "
        "only the heads' scores are used, as in 0-gram."
    ),
    "Oracle": (
        "The longest path through the lattice that matches the text: no draft from the "
        "lattice has more accepted tokens."
    ),
    "Headroom taken": "(BE - BE of BPD) / (BE of the oracle - BE of BPD).",
}
"""Terms of the studies' page."""
