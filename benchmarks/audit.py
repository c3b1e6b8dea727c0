"""Recomputes the numbers of README and docs from the JSON of committed records.

    python benchmarks/audit.py             # prints what differs, and exits with 1

It shares no code with bpd_jax: records are read as JSON, and every quantity is computed
again from its definition. `benchmarks/audit.txt` has a line for each number: a page, a
tab, and the words around the number with an expression in braces in its place:

    README.md	With independent heads BPD yields {be table4 smollm2_heads bpd} tokens

A number may differ by half a unit of its last digit, an end of an interval, which
depends on the resampling, by a tenth of the interval more.
"""

import functools
import json
import lzma
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
LINES = ROOT / "benchmarks" / "audit.txt"
DIGITS = {c: i for i, c in enumerate("0123456789abcdefghijklmnopqrstuvwxyz")}
SEVEN = [
    "lambada",
    "squad",
    "cnn_dailymail",
    "samsum",
    "multi_news",
    "xsum",
    "newsroom",
]
NUMBER = r"([−+-]?\d[\d,]*(?:\.\d+)?)"

# A number of tokens per call, percent, points, milliseconds or nats.
MEASURED = re.compile(
    r"[−+]?\d[\d,]*\.\d+(?= %| points| percentage| tokens per| ms\b| nats| times)"
)


@functools.cache
def records(study: str, size: str) -> list[dict]:
    """The records of a study."""
    folder = ROOT / "experiments" / study / "results" / size
    with lzma.open(folder / "records.jsonl.xz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def digits(text: str) -> list[int]:
    """Numbers of one character each; large ones are code points from 256 on."""
    return [DIGITS[c] if c in DIGITS else ord(c) - 256 for c in text]


def calls(accepted: list[int]) -> list[int]:
    """The positions at which decoding calls the model."""
    positions, at = [], 0
    while at < len(accepted):
        positions.append(at)
        at += accepted[at]
    return positions


@functools.cache
def drafts(
    study: str, size: str, contender: str, task: str = "", part: str = "report"
) -> dict[tuple[str, int], dict]:
    """Records of a contender by text; `task` is `A,B,…`, `seven` or "" for all.

    `SIZE!CONTENDER` is a contender of another size of the study, with the same texts.
    """
    other, mark, contender = contender.rpartition("!")
    size, found = other if mark else size, {}
    for r in records(study, size):
        if (r["kind"], r.get("contender"), r.get("part")) != ("draft", contender, part):
            continue
        wanted = SEVEN if task == "seven" else task.split(",")
        if not task or r["task"] in wanted:
            yields = digits(r["accepted"])
            found[r["task"], r["example"]] = {
                **r,
                "yields": yields,
                "at": calls(yields),
            }
    if not found:
        raise KeyError(f"{study} {size} has no {contender} {task}")
    return found


def sums(*names: str, keys: list | None = None) -> np.ndarray:
    """Tokens and calls of texts, `[n, 2]`."""
    found = drafts(*names)
    return np.array(
        [[len(found[k]["yields"]), len(found[k]["at"])] for k in keys or found]
    )


def be(*names: str) -> float:
    """Tokens per serial call."""
    tokens, passes = sums(*names).sum(0)
    return tokens / passes


def nodes(*names: str) -> float:
    """Draft tokens that a call verifies."""
    found = drafts(*names).values()
    return sum(r["nodes"] for r in found) / sum(len(r["at"]) for r in found)


def pair(study: str, size: str, one: str, other: str, task: str = "") -> np.ndarray:
    """Tokens and calls of two contenders on the texts that both have, `[2, n, 2]`."""
    names = [(study, size, name, task) for name in (one, other)]
    keys = sorted(set(drafts(*names[0])) & set(drafts(*names[1])))
    return np.array([sums(*name, keys=keys) for name in names])


def ratio(both: np.ndarray) -> float:
    """The gain of the first one in percent."""
    (tokens, passes), (base_tokens, base_passes) = both.sum(1)
    return 100 * (tokens / passes * base_passes / base_tokens - 1)


def gain(*names: str) -> float:
    """The gain of one contender over another, in percent."""
    return ratio(pair(*names))


def loss(*names: str) -> float:
    """The same with the other sign."""
    return -gain(*names)


@functools.cache
def interval(*names: str) -> tuple[float, float]:
    """Percentile bootstrap interval of `gain` over texts."""
    both, rng = pair(*names), np.random.default_rng(1)
    count = both.shape[1]
    values = [ratio(both[:, rng.integers(count, size=count)]) for _ in range(4000)]
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def family(study: str, size: str, name: str) -> str:
    """The member of `NAME:alpha=…@SET` with the most tokens per call in tuning."""
    method, _, models = name.partition("@")
    start, end = f"{method}:alpha=", f"@{models}"
    names = {r["contender"] for r in records(study, size) if r["kind"] == "draft"}
    members = [n for n in names if n.startswith(start) and n.endswith(end)]
    weights = {n: float(n[len(start) : -len(end)]) for n in members}
    values = {n: be(study, size, n, "", "tune") for n in members if weights[n] > 0}
    return min(values, key=lambda n: (-values[n], abs(weights[n] - 1), weights[n]))


def best(study: str, size: str, name: str) -> float:
    """Reported tokens per call under the tuned weight."""
    return be(study, size, family(study, size, name))


def bestnodes(study: str, size: str, name: str) -> float:
    """Draft tokens under the tuned weight."""
    return nodes(study, size, family(study, size, name))


def weight(study: str, size: str, name: str) -> float:
    """The tuned weight."""
    return float(family(study, size, name).partition("alpha=")[2].partition("@")[0])


def repetition(names: tuple[str, ...], total: Callable[[dict], tuple]) -> float:
    """A ratio of sums over the drafts of at least two tokens at all positions."""
    over, under = map(sum, zip(*map(total, drafts(*names).values()), strict=True))
    return over / under


def equal(*names: str) -> float:
    """Percentage of neighbouring tokens of a draft that are equal."""

    def total(r: dict) -> tuple[int, int]:
        pairs = [max(n - 1, 0) for n in digits(r["length"])]
        return sum(digits(r["equal"])), sum(pairs)

    return 100 * repetition(names, total)


def run(*names: str) -> float:
    """Mean longest run of one token in a draft."""

    def total(r: dict) -> tuple[int, int]:
        both = zip(digits(r["length"]), digits(r["longest"]), strict=True)
        runs = [longest for length, longest in both if length > 1]
        return sum(runs), len(runs)

    return repetition(names, total)


def sides(study: str, size: str, contender: str) -> Iterator[tuple[str, bool]]:
    """Whether a position is won, and whether repetition is repaired there."""
    base = drafts(study, size, "bpd")
    for key, refined in drafts(study, size, contender).items():
        columns = (base[key]["yields"], refined["yields"])
        repeats = digits(base[key]["equal"]), digits(refined["equal"])
        for old, new, before, after in zip(*columns, *repeats, strict=True):
            side = "wins" if new > old else "losses" if new < old else "ties"
            yield side, before > 0 and after == 0


def count(study: str, size: str, contender: str, side: str) -> float:
    """The number of wins, losses or ties of Table 5."""
    return sum(one == side for one, _ in sides(study, size, contender))


def repair(study: str, size: str, contender: str, side: str) -> float:
    """The percentage of them where repetition is repaired."""
    of_side = [fixed for one, fixed in sides(study, size, contender) if one == side]
    return 100 * sum(of_side) / len(of_side)


def entropy(study: str, size: str) -> float:
    """Mean entropy of heads 2 to L, in nats."""
    values = [
        np.array([*map(digits, r["steps"])]).ravel()
        for r in records(study, size)
        if (r["kind"], r.get("part")) == ("entropy", "report")
    ]
    return 0.125 * float(np.concatenate(values).mean())


def latency(study: str, size: str, engine: str, paths: str) -> float:
    """Median milliseconds of a search in 8 steps of 16 arcs."""
    wanted = {"engine": engine, "steps": 8, "width": 16, "paths": int(paths)}
    [times] = [
        r["milliseconds"]
        for r in records(study, size)
        if r["kind"] == "latency" and all(r[k] == v for k, v in wanted.items())
    ]
    return float(np.median(times))


def tgain(study: str, size: str, one: str, other: str, temperature: str) -> float:
    """The gain in tokens per call of a timed contender, in percent."""
    totals = {}
    for r in records(study, size):
        if r["kind"] == "timing" and r["temperature"] == float(temperature):
            tokens, passes = totals.get(r["contender"], (0, 0))
            totals[r["contender"]] = tokens + r["tokens"], passes + r["calls"]
    (tokens, passes), (base_tokens, base_passes) = totals[one], totals[other]
    return 100 * (tokens / passes * base_passes / base_tokens - 1)


def value_of(file: str, *path: str) -> float:
    """A number of a JSON file; a part of the path is a key or an index."""
    value = json.loads((ROOT / file).read_text(encoding="utf-8"))
    for part in path:
        if isinstance(value, dict) and part not in value:
            value = [*value.values()]
        value = value[int(part) if isinstance(value, list) else part]
    return float(value)


FUNCTIONS = {
    **{f.__name__: f for f in (be, gain, loss, nodes, best, bestnodes, weight, equal)},
    **{f.__name__: f for f in (run, count, repair, entropy, latency, tgain)},
    "json": value_of,
    "low": lambda *names: interval(*names)[0],
    "high": lambda *names: interval(*names)[1],
}


def check(page: str, fragment: str) -> str:
    """What is wrong with a line of `audit.txt`; "" if nothing is."""
    words, expression, rest = re.split(r"\{(.*?)\}", fragment, maxsplit=1)
    found = [match[1] for match in matches(page, words, rest)]
    if len(found) != 1:
        return f"{page}: {len(found)} times on the page: {fragment}"
    printed = found[0].replace("−", "-").replace(",", "")
    name, *arguments = expression.split()
    value = FUNCTIONS[name](*arguments)
    tolerance = 0.5 * 10.0 ** -len(printed.partition(".")[2]) + 1e-9
    if name in ("low", "high"):
        low, high = interval(*arguments)
        tolerance += (high - low) / 10
    if abs(float(printed) - value) <= tolerance:
        return ""
    return f"{page}: {found[0]}, but {value:.4f}: {fragment}"


def matches(page: str, words: str, rest: str) -> list[re.Match[str]]:
    """Where a number stands between the words, overlapping places included."""
    pattern = f"(?={re.escape(words)}{NUMBER}{re.escape(rest)})"
    return [*re.finditer(pattern, text_of(page))]


@functools.cache
def text_of(page: str) -> str:
    """A page with single spaces, without emphasis."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("**", "")
    return " ".join(text.split())


def lines() -> list[tuple[str, str]]:
    """The pages and fragments of `audit.txt`."""
    rows = LINES.read_text(encoding="utf-8").splitlines()
    return [tuple(row.split("\t")) for row in rows if row]


def unchecked(page: str) -> list[str]:
    """Measured numbers of a page that no line of `audit.txt` has."""
    checked = set()
    for of_page, fragment in lines():
        if of_page == page:
            words, _, rest = re.split(r"\{(.*?)\}", fragment, maxsplit=1)
            checked |= {match.start(1) for match in matches(page, words, rest)}
    text = text_of(page)
    generated = range(text.find("<!-- verdicts -->"), text.find("<!-- end of verd"))
    return [
        f"…{text[max(match.start() - 40, 0) : match.end() + 20]}…"
        for match in MEASURED.finditer(text)
        if match.start() not in checked and match.start() not in generated
    ]


def main() -> None:
    """Prints what differs, then the numbers that are not recomputed."""
    wrong = [problem for line in lines() if (problem := check(*line))]
    print("\n".join(wrong) or f"{len(lines())} numbers are those of the records.")
    for page in dict.fromkeys(page for page, _ in lines()):
        for words in unchecked(page):
            print(f"not recomputed, {page}: {words}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
