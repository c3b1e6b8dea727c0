"""The picture of one block with a plain and a refined draft."""

import xml.etree.ElementTree as ElementTree

from bpd_jax.reporting.draft_picture import largest_gain, svg
from bpd_jax.reporting.explorer import ExplorerText

PIECES = ["<a>", " b", " b", "\n", "d", " e"]
# Of heads 2 and 3, for the blocks at 0 and at 2.
LATTICE = [[[1, 2], [3, 4]]] * 3


def text(key, plain, refined, at=0):
    calls = [("bpd", [0, 1, 3], plain, 0), ("bpd", [0, 1, 3], 1, 2)]
    calls.append(("ngram:16", [0, 2, 5], refined, at))
    traces = [
        {
            "contender": name,
            "label": name.upper(),
            "calls": [
                {"at": at, "draft": tokens, "winner": tokens, "accepted": accepted}
                for contender, tokens, accepted, at in calls
                if contender == name
            ],
        }
        for name in ("bpd", "ngram:16")
    ]
    return ExplorerText(key, "group", key, "", PIECES, [0], LATTICE, [], traces)


def test_the_block_of_the_largest_gain_is_chosen():
    picture = largest_gain([text("x", 2, 1), text("y", 1, 3), text("z", 1, 2, at=2)])
    assert (picture.text.key, picture.at, picture.blocks) == ("y", 0, 3)
    assert (picture.plain.accepted, picture.refined.accepted) == (1, 3)
    # Positions count at which both methods drafted, whatever they accepted before.
    assert largest_gain([text("z", 1, 2, at=2)]).at == 2


def test_the_contents_of_the_picture():
    root = ElementTree.fromstring(svg(largest_gain([text("x", 1, 3)])))
    space = "{http://www.w3.org/2000/svg}"
    labels = root.findall(f"{space}text")
    strings = [label.text for label in labels]
    # Markup in a token stays text, and whitespace is shown by a sign.
    assert strings.count("<a>") == 1 + 2
    assert "⏎" in strings
    struck_through = [label.text for label in labels if label.get("text-decoration")]
    assert struck_through == ["b", "⏎"]
    # The refined draft's last token was not among the candidates of its head.
    assert strings.count("e") == 2
    assert len(root.findall(f"{space}polyline")) == 2
    assert "1 unrefined, 3 refined, of 3" in strings[-1]
    assert "(3 tokens accepted)" in root.get("aria-label")
