"""What the drafts of each method look like: figures, and a small chart per method."""

from bpd_jax.reporting import wording
from bpd_jax.reporting.records import MethodSummary, Report
from bpd_jax.reporting.wording import escaped

# Of the chart, in its own units.
_WIDTH, _HEIGHT = 136.0, 38.0


def section(report: Report) -> str:
    """Returns the body of the section, or nothing if no method drafts."""
    methods = wording.drafted(report)
    if not methods:
        return ""
    top = max((share for method in methods for share in method.accepted), default=1.0)
    headings = [*wording.DRAFT_HEADINGS, "Accepted per call"]
    rows = "".join(_row(method, top) for method in methods)
    return (
        "<p>Figures over all serial calls. The bars are the shares of calls that "
        "accept 1, 2, … tokens, from left to right, on one scale for all methods; a "
        "whole draft is green.</p>"
        '<div class="card scroll" role="region" aria-labelledby="statistics" '
        'tabindex="0"><table class="figures"><thead><tr><th scope="col">Method</th>'
        + "".join(
            f'<th scope="col">{escaped(heading).replace(chr(10), "<br>")}</th>'
            for heading in headings
        )
        + f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(method: MethodSummary, top: float) -> str:
    style = ' class="bound"' if method.upper_bound else ""
    cells = "".join(f"<td>{cell}</td>" for cell in wording.draft_figures(method))
    return (
        f'<tr{style}><th scope="row">{escaped(method.label)}</th>{cells}'
        f"<td>{_chart(method.accepted, top)}</td></tr>"
    )


def _chart(shares: list[float], top: float) -> str:
    """Bars for the shares of calls that accept 1, 2, … tokens."""
    if not shares:
        return wording.MISSING
    words = [
        f"{count}: {wording.percent(share, sign=False)}"
        for count, share in enumerate(shares, start=1)
    ]
    step = _WIDTH / len(shares)
    bars = ""
    for index, (share, word) in enumerate(zip(shares, words, strict=True)):
        height = round((_HEIGHT - 1) * share / top, 2)
        whole = ' class="whole"' if index == len(shares) - 1 else ""
        bars += (
            f'<rect{whole} x="{index * step:.2f}" y="{_HEIGHT - 1 - height:.2f}" '
            f'width="{0.8 * step:.2f}" height="{height}"><title>{word}</title></rect>'
        )
    return (
        f'<svg class="shares" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        'preserveAspectRatio="none" '
        f'aria-label="Calls by accepted tokens: {"; ".join(words)}">{bars}'
        f'<line x1="0" x2="{_WIDTH:g}" y1="{_HEIGHT - 0.5}" y2="{_HEIGHT - 0.5}"/>'
        "</svg>"
    )
