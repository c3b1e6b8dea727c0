"""The table of verdicts on docs/reproduction.md is that of the committed records."""

import pytest

from bpd_jax.studies.claims import VERDICTS
from experiments import claims
from tests.experiments.builders import draft, run_of


@pytest.fixture(scope="module")
def rows():
    return [*claims.rows()]


def test_the_table_of_the_page_is_generated(rows, monkeypatch):
    monkeypatch.setattr(claims, "rows", lambda: iter(rows))
    page = claims.PAGE.read_text()
    assert claims.with_table(page, claims.table()) == page


def test_every_claim_has_a_source_and_a_verdict(rows):
    known = [*VERDICTS[:3], "by construction"]
    for claim, (_, statement, *cells) in zip(claims.CLAIMS, rows, strict=True):
        assert statement.endswith(f"({claim.source})")
        assert any(cell != "–" for cell in cells), statement
        for cell in cells:
            assert cell == "–" or any(f"[{v}]" in cell.replace("*", "") for v in known)


def test_gains_are_measured_on_the_papers_tasks():
    """Ten texts of SQuAD gain a half, ten of a category that the paper has not lose."""
    records = [
        draft(contender, task, accepted, example=example)
        for contender, task, accepted in (
            ("bpd", "squad", "1" * 12),
            ("neural:1@deep", "squad", "2121" * 3),
            ("bpd", "math", "21" * 6),
            ("neural:1@deep", "math", "1" * 12),
        )
        for example in range(10)
    ]
    run = run_of("table4", records, ("squad", "math"))
    [claim] = [c for c in claims.CLAIMS if c.statement == "Neural rescoring gains"]
    [effect] = claim.measure(run)
    assert effect.value == pytest.approx(100)
    assert claims.verdict(claim, [effect]) == "agrees"
