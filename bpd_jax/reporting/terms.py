"""Terms of the pages, explained."""

DEFINITIONS = {
    "Serial call": (
        "One pass of the model inside the decode loop. It checks a whole draft at "
        "once; the prefill of the prompt is not counted."
    ),
    "Block efficiency": (
        "Decoded tokens divided by serial calls: 1 for greedy decoding, at "
        "most the length of a draft, which for heads is their number L. An "
        "interval, where one is given, is a bootstrap interval over the prompts."
    ),
    "Gain over BPD": (
        "Block efficiency divided by that of blockwise parallel decoding with "
        "independent heads (BPD), minus one."
    ),
    "Output": (
        "Compared with plain greedy decoding, token for token. Identical: "
        "every prompt gave the same tokens. Near-tie: the first difference is where "
        "the model's two best tokens are equal up to rounding. Different: anything "
        "else."
    ),
    "Tokens checked": (
        "Draft tokens that one serial call checks, the mean over all calls; what "
        "drafts share counts once."
    ),
    "No gain": (
        "Share of the serial calls that accept one token, which is what plain decoding "
        "would have given."
    ),
    "Equal neighbours": (
        "Share of the neighbouring tokens of a method's best-ranked drafts that are "
        "the same token twice. Longest run: how often a token follows itself, the mean "
        "over the drafts. Independent heads repeat themselves."
    ),
    "Entropy of the heads": (
        "How unsure the block heads are, in nats, the mean over all calls: of head 2, "
        "one token past the certain one, and of the last head that drafts."
    ),
    "Interval of the gain": (
        "Paired bootstrap interval: every resample draws the same prompts for the "
        "method and for BPD. Where it leaves out zero, the gain is no accident of the "
        "prompts."
    ),
    "Wall time": (
        "Seconds for all prompts on the device named here, compilation not counted; "
        "of several rounds the median. It depends on the machine; block efficiency "
        "does not."
    ),
    "Speed-up": (
        "Wall time of greedy decoding divided by that of the method. All methods take "
        "turns in every round; this is the median of the ratios within a round."
    ),
}

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
"""Terms of the studies' page; each is explained by those before it."""
