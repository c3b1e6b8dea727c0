"""Accepted tokens as a function of training data: a table and a chart of finished runs.

    python -m benchmarks.drafter_scaling --runs=runs/scaling

Reads `heads/heads.json` and `drafter/drafter.json` of every folder in `--runs`, which
contain the evaluation at the end of training (`training.objective`): accuracy by
position on held-out texts and on training texts, and the expected tokens per call with
one draft. The expectation is over all positions; a decoder drafts where the last draft
failed, which is harder. Tokens and milliseconds per call of a decoder are read from
`decoding.json` of the runs that have it, a result of `benchmarks.decoding`:

    python -m benchmarks.decoding --model=smollm2 --drafter=RUN/drafter \\
        --methods=block/greedy,block/tree:8 --output=RUN/decoding.json

Prints a table, and writes a JSON file and a chart beside it.
"""

import json
import pathlib
from typing import Any

from benchmarks import records
from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.reporting import charts
from bpd_jax.reporting.exhibits import LINES, Chart, Series
from bpd_jax.storage import files

RUNS = cli.DEFINE_path("runs", None, "parent folder of the runs.")
OUTPUT = cli.DEFINE_path(
    "output", "benchmarks/results/drafter_scaling.json", "file of the results."
)

_HEADERS = ("heads/heads.json", "drafter/drafter.json")

# Fields of `benchmarks.decoding` that are repeated, and those of every method.
_FACTS = ("device", "date", "prompts", "new_tokens")
_DECODING = (
    "block_efficiency",
    "ms_per_serial_call",
    "ms_drafting_alone",
    "speedup",
    "texts_that_differ",
)


def main() -> None:
    """Reads the runs; prints and writes the results."""
    rows = read_runs(pathlib.Path(cli.required("runs")))
    output = pathlib.Path(OUTPUT.value)
    records.write(output, {**records.about("drafter_scaling"), "runs": rows})
    files.write_text(output.with_suffix(".svg"), charts.standalone(chart(rows)))
    print_table(rows)
    print(f"written to {output}")


def read_runs(folder: pathlib.Path) -> list[dict[str, Any]]:
    """One row for each finished run, by arm and number of positions."""
    paths = [path for name in _HEADERS for path in folder.glob(f"*/{name}")]
    if not paths:
        raise UserError(
            f"{folder} contains no finished run of heads or block drafters."
        )
    rows = [_row(path) for path in paths]
    return sorted(rows, key=lambda row: (row["arm"], row["positions"], row["run"]))


def _row(path: pathlib.Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        facts = about["facts"]
        return {
            "run": path.parent.parent.name,
            "arm": arm_of(about["config"]),
            "positions": facts["positions"],
            "steps": facts["steps"],
            "batch_size": facts["settings"]["batch_size"],
            "epochs": facts["steps"]
            * facts["settings"]["batch_size"]
            / facts["positions"],
            "megabytes": round(
                sum(f.stat().st_size for f in path.parent.iterdir()) / 1e6, 2
            ),
            "seconds": facts["seconds"],
            "held_out": _measured(facts),
            "train": None if facts["train"] is None else _measured(facts["train"]),
            "decoding": _decoding(path.parent.parent / "decoding.json"),
            "versions": facts["versions"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read the measurements in {path} ({error!r}): train it again."
        ) from error


def _measured(facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens_per_call": facts["tokens_per_call"],
        "top_1": facts["top"]["1"],
        "top_16": facts["top"]["16"],
        "chain": facts["chain"],
    }


def _decoding(path: pathlib.Path) -> dict[str, Any] | None:
    """Results of `benchmarks.decoding` with the drafter, by search; None if missing."""
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        facts = {key: result[key] for key in _FACTS}
        searches: dict[str, dict[str, Any]] = {}
        for name, row in result["methods"].items():
            search = name.partition("/")[2]
            if search in searches:
                raise UserError(f"{path} has two methods with the search {search}.")
            if row["texts_that_differ"] > row["of_them_near_ties"]:
                raise UserError(f"{path}: texts differ from plain decoding by {name}.")
            if search:
                searches[search] = {key: row[key] for key in _DECODING}
        return {**facts, "searches": searches}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"cannot read the measurements in {path} ({error!r}): measure it again."
        ) from error


def arm_of(config: dict[str, Any]) -> str:
    """The kind of drafter that a header describes."""
    if "block_size" in config:
        markov = " with a Markov head" if config["markov_rank"] else ""
        layers = config["num_layers"]
        return f"block drafter of {layers} layer{'s' * (layers > 1)}{markov}"
    if config.get("reads_anchor") or config.get("feature_layers"):
        return "conditioned heads"
    return "heads"


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each run; in brackets, values on texts of the training."""
    searches = dict.fromkeys(
        search for row in rows for search in (row["decoding"] or {}).get("searches", ())
    )

    def cells(row: dict[str, Any]) -> list[str]:
        parts = [part for part in (row["held_out"], row["train"]) if part]
        calls = [f"{part['tokens_per_call']:.2f}" for part in parts]
        tops = [_positions(part["top_1"]) for part in parts]
        measured = (row["decoding"] or {}).get("searches", {})
        speeds = [
            "{block_efficiency:.2f}, {ms_per_serial_call:.1f}, {speedup:.2f}".format(
                **measured[name]
            )
            if name in measured
            else "not measured"
            for name in searches
        ]
        bracketed = (" (".join(each) + ")" * (len(each) - 1) for each in (calls, tops))
        sizes = _positions(row["held_out"]["top_16"]), f"{row['megabytes']:.1f}"
        return [row["arm"], f"{row['positions']:,}", *bracketed, *sizes, *speeds]

    figures = ["positions", "tokens per call", "top-1 of 1, 2, 3, 5", "top-16", "MB"]
    speeds = [f"{name}: tokens per call, ms per call, speed-up" for name in searches]
    for line in (["arm", *figures, *speeds], *map(cells, rows)):
        print(" | ".join(line))


def _positions(values: list[float]) -> str:
    """Percentages of those of positions 1, 2, 3 and 5 that exist."""
    picked = [values[j - 1] for j in (1, 2, 3, 5) if j <= len(values)]
    return " / ".join(f"{100 * value:.0f}" for value in picked) + " %"


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Tokens per call over positions; a line for each arm, dashed on training texts."""
    series = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        for part, dashed in (("held_out", False), ("train", True)):
            points = [row for row in mine if row[part] is not None]
            if not points:
                continue
            series.append(
                Series(
                    f"{arm}, {'texts of the training' if dashed else 'held-out texts'}",
                    [float(row["positions"]) for row in points],
                    [row[part]["tokens_per_call"] for row in points],
                    dashed=dashed,
                )
            )
    return Chart(
        "drafter_scaling",
        "Accepted tokens per call with one draft",
        LINES,
        "positions of the training",
        "tokens per call",
        series,
        logarithmic=True,
    )


if __name__ == "__main__":
    cli.run(main)
