from bpd_jax.reporting.exhibits import Cell
from bpd_jax.studies.study_records import LatencyRecord
from experiments.table12.study import LABELS
from tests.experiments.builders import exhibit_of, rows_of


def test_cells_are_medians_with_their_range_beside_the_paper():
    records = [
        LatencyRecord("viterbi", 8, 16, 1, [0.3, 0.1, 0.2]),
        LatencyRecord("fst", 8, 16, 1, [1.0, 3.0, 2.0]),
        LatencyRecord("fst", 8, 16, 16, [2.0, 9.0, 4.0]),
        LatencyRecord("fst", 8, 2, 1, [0.5]),
    ]
    exhibit = exhibit_of("table12", records)
    table12, table13 = exhibit.tables
    # The paper's engine comes first, whatever was measured first.
    assert [row.label for row in table12.rows] == [LABELS["fst"], LABELS["viterbi"]]
    one_path, two_paths, *_, sixteen_paths, growth = table12.rows[0].cells
    assert one_path == Cell(2.0, 1.630, (1.0, 3.0))
    assert two_paths == Cell(paper=1.751, text="not measured")
    assert (sixteen_paths.value, sixteen_paths.paper) == (4.0, 1.983)
    assert (growth.value, growth.paper) == (4.0 / 2.0, 1.983 / 1.630)
    one_path, *_, growth = table12.rows[1].cells
    assert (one_path.value, one_path.paper) == (0.2, None)
    assert growth.text == "not measured"

    # The best path of 8 steps and 16 candidates stands in both tables.
    cells = rows_of(table13)[f"{LABELS['fst']}, 8 steps"]
    assert [cell.value for cell in cells] == [0.5, None, None, 2.0, 4.0]
    assert [cell.paper for cell in cells[:4]] == [1.061, 1.144, 1.234, 1.630]
    assert cells[4].paper == 1.630 / 1.061


def test_findings_report_ratios():
    records = [
        LatencyRecord("viterbi", 8, 16, 1, [1.0]),
        LatencyRecord("viterbi", 8, 16, 16, [1.4]),
        LatencyRecord("viterbi", 4, 2, 1, [0.1]),
        LatencyRecord("viterbi", 4, 16, 1, [0.5]),
        LatencyRecord("viterbi", 8, 2, 1, [0.125]),
        LatencyRecord("fst", 8, 16, 1, [1.0]),
        LatencyRecord("fst", 8, 16, 16, [1.6]),
    ]
    exhibit = exhibit_of("table12", records)
    *_, paths, width = exhibit.findings
    # More paths: 1.6 times, more than 1.5; then 1.4. More candidates: 8 times for 8.
    verdicts = [finding.holds for finding in exhibit.findings]
    assert verdicts == [False, None, True, False]
    assert "1.40 times" in paths.evidence
    assert "1.22 times" in paths.evidence  # the paper's 1.983 / 1.630
    assert "8.00 times at 8 steps" in width.evidence
