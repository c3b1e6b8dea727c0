"""Explanations of terms on the pages."""

DEFINITIONS = {
    "Serial call": (
        "One pass of the model in the decode loop, which verifies a complete draft. "
        "Prefill is not counted."
    ),
    "Block efficiency": (
        "Decoded tokens divided by serial calls: 1 for greedy decoding, at "
        "most the length of a draft, which is L for L heads. Intervals are bootstrap "
        "intervals over the prompts."
    ),
    "Gain over BPD": (
        "Block efficiency divided by that of blockwise parallel decoding with "
        "independent heads (BPD), minus one."
    ),
    "Output": (
        "Comparison with plain greedy decoding, token by token. Identical: the tokens "
        "are equal for every prompt. Near-tie: at the first difference, the model's "
        "two best tokens are equal up to rounding. Different: any other difference."
    ),
    "Interval of the gain": (
        "Paired bootstrap interval: every resample draws the same prompts for the "
        "method and for BPD. If it excludes zero, the gain is significant."
    ),
    "Wall time": (
        "Seconds for all prompts on the given device, without compilation; the median "
        "over several rounds. Unlike block efficiency, it depends on the machine."
    ),
    "Speed-up": (
        "Wall time of greedy decoding divided by that of the method. The methods "
        "alternate within every round; this is the median of the ratios within a round."
    ),
}

TERMS = {
    "Blockwise parallel decoding (BPD)": (
        "Heads of one model predict the next L tokens at once. The model verifies this "
        "draft in one pass and accepts the longest prefix that it would have generated "
        "itself, so that the text equals that of plain greedy decoding. BPD also "
        "denotes the unrefined drafts of the heads."
    ),
    "Serial call": DEFINITIONS["Serial call"],
    "Block efficiency (BE)": (
        "Decoded tokens divided by serial calls: 1 for greedy decoding, at most the "
        "number of heads L."
    ),
    "Lattice": (
        "The k best candidates of every head at one position. Every path through it, "
        "with one candidate of each head, is a possible draft."
    ),
    "Refinement": (
        "Selecting a better draft from the lattice with a small language model."
    ),
    "n-gram, neural, tree": (
        "Forms of refinement and of drafts. n-gram: an n-gram model scores complete "
        "drafts. Neural: a small transformer scores one token after another. Tree: "
        "drafts with common prefixes are verified together."
    ),
    "1-best, p-best": (
        "Number of drafts that the model verifies in one call: the best one, or the p "
        "best, of which the one with the most accepted tokens counts."
    ),
    "alpha": (
        "The weight of the rescorer's scores relative to those of the heads; with 0 "
        "only the heads' scores are used, as in 0-gram."
    ),
    "Oracle": (
        "The longest path through the lattice that matches the text: no draft from the "
        "lattice has more accepted tokens."
    ),
    "Headroom taken": (
        "Share of the difference between BPD and the oracle that a method gains: its "
        "BE minus that of BPD, divided by the oracle's BE minus that of BPD."
    ),
}
"""Terms of the studies' page; explanations use only the terms before them."""
