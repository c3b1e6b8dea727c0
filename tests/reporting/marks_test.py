"""Labels of points do not overlap and lie inside the drawing."""

import itertools

from bpd_jax.reporting import marks
from bpd_jax.reporting.marks import Box


def test_labels_do_not_overlap_and_unreadable_ones_are_left_out():
    close = [(100, 100, "MultiNews"), (104, 103, "XSum"), (112, 96, "NewsRoom")]
    crowd = [(100 + i % 5, 100 + i // 5, f"Name {i}") for i in range(40)]
    for points, least, most, share in ((close, 3, 3, 0), (crowd, 2, 19, 0.2)):
        placed = marks.place_labels(points, Box(0, 0, 300, 200))
        assert least <= len(placed) <= most
        for first, second in itertools.combinations(placed, 2):
            assert first.box.intersection(second.box) <= share * first.box.area
