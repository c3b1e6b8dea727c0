"""Regenerates tables and figures of the paper.

    python -m experiments.run table4 --size=smollm2 --data=FOLDER
    python -m experiments.run table4 figure6 --size=smollm2 --data=FOLDER --limit=4
    python -m experiments.run all --size=tiny

Every study has a folder here with a gin file for each size. Texts are decoded once per
model and task and stored; methods are replayed on them. `WORKDIR/STUDY/` contains the
configuration, versions and device (`study.json`) and the raw records of every example
(`records.jsonl`), from which `bpd_jax.report WORKDIR` makes all tables and figures. An
interrupted run resumes with the same command.

The weight α of each class of rescorers is tuned first, for every task, on examples that
are not reported (`bpd_jax.studies.tuning`); with `--gin.StudyConfig.tuners={}` it is 1.

`--shard=I/N` measures every N-th example, so that N programs, one per device or host,
share the work on one WORKDIR. `--publish` copies the results to
`experiments/STUDY/results/`.
"""

import dataclasses
import functools
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable

from absl import flags

from bpd_jax.base import cli, provenance
from bpd_jax.base.configuration import Parsed
from bpd_jax.base.errors import UserError
from bpd_jax.data.row_sources import WHOLE, Shard
from bpd_jax.reporting.terminal_tables import print_exhibit
from bpd_jax.storage import folders
from bpd_jax.studies import run_files
from bpd_jax.studies.missing_records import measure
from bpd_jax.studies.run_header import (
    check_header,
    check_settings,
    facts_of,
    merge_facts,
)
from bpd_jax.studies.study import DRAFTING
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import Record
from bpd_jax.studies.tasks import HELD_OUT
from bpd_jax.studies.tuning import tune
from bpd_jax.training import hosts, process_flags
from experiments.catalog import choose, configure, find_study, results_folder
from experiments.table7.in_domain import build_in_domain

SIZE = flags.DEFINE_string(
    "size", "tiny", "tiny, small, smollm2_heads, smollm2, …: the gin file of this name."
)
DATA = cli.DEFINE_path(
    "data",
    None,
    "Folder of the tasks: JSON Lines (NAME/SPLIT.jsonl.gz) or TensorFlow Datasets.",
)
WORKDIR = cli.DEFINE_path(
    "workdir", None, "Folder of the results; default: runs/paper/SIZE."
)
LIMIT = flags.DEFINE_integer(
    "limit", None, "Number of examples of each task, for a quick look."
)
SHARD = flags.DEFINE_string(
    "shard", None, "I/N: measure only the examples I, I + N, I + 2 N, …."
)
PUBLISH = flags.DEFINE_bool(
    "publish",
    False,
    "Only copy the results to experiments/STUDY/results/SIZE.",
)

_HERE = pathlib.Path(__file__).parent


def main(names: list[str]) -> None:
    """Runs the studies one after the other."""
    chosen = choose(names, SIZE.value)
    parsed = {name: _configure(name) for name in chosen}
    shard = _shard()
    for name in chosen:
        config = parsed[name].value
        folder = _workdir() / name
        if PUBLISH.value:
            output = _HERE / name / "results" / SIZE.value
            run = run_files.open_run(folder)
            hosts.first(functools.partial(run_files.publish, run, output))
            print(f"{len(run.records)} records: {output}")
            continue
        _measure(name, config, shard, parsed[name].text)
        if shard == WHOLE:
            print_exhibit(find_study(name).exhibit(run_files.open_run(folder)))
            print(f"results: {folder}")
    if not PUBLISH.value:
        print(f"report:  python -m bpd_jax.report {_workdir()}")


def _workdir() -> pathlib.Path:
    limit = "" if LIMIT.value is None else f"_limit{LIMIT.value}"
    return results_folder(WORKDIR.value, SIZE.value + limit)


def _configure(name: str) -> Parsed[StudyConfig]:
    """The configuration of a study, from gin files and flags."""
    files, bindings = flags.FLAGS.gin_file, flags.FLAGS.gin_bindings
    parsed = configure(name, SIZE.value, files, bindings)
    config = process_flags.with_mesh_if_set(parsed)
    if DATA.value:
        # Not through gin, because the folder is not stored with the results.
        config = dataclasses.replace(config, data=DATA.value)
    if LIMIT.value is not None:
        tune = min(LIMIT.value, config.tune)
        config = dataclasses.replace(config, examples=LIMIT.value, tune=tune)
    # Asset folders may be inside the folder of the results.
    assets = {
        name: {
            kind: path.replace("{workdir}", str(_workdir())) for kind, path in a.items()
        }
        for name, a in config.assets.items()
    }
    return dataclasses.replace(parsed, value=dataclasses.replace(config, assets=assets))


def _shard() -> Shard:
    if SHARD.value is None:
        return WHOLE
    match = re.fullmatch(r"(\d+)/(\d+)", SHARD.value, re.ASCII)
    if match is None or not int(match[1]) < int(match[2]):
        raise UserError(f"--shard={SHARD.value} is not I/N with I from 0 to N - 1.")
    return Shard(int(match[1]), int(match[2]))


def _measure(name: str, config: StudyConfig, shard: Shard, text: str) -> None:
    """Computes the missing records of a study."""
    folder = _workdir() / name
    folders.check_folder(folder, run_files.KIND)
    folder.mkdir(parents=True, exist_ok=True)
    context = StudyContext(config, _workdir(), shard)
    in_domain = {}
    for task in config.tasks if config.in_domain else ():
        if task != HELD_OUT:
            context.whole_draw(task)  # All processes load the model together.
            facts = hosts.first(functools.partial(build_in_domain, context, task))
            in_domain[task] = hosts.agree(facts)["texts"]
    left_out = context.unavailable(config.contenders)
    for contender, reason in left_out.items():
        print(f"left out: {contender}: {reason}")
    if len(left_out) == len(config.contenders) > 0:
        raise UserError("no contender is left: the reasons are listed above.")
    kept = [c for c in config.contenders if c not in left_out]
    context = StudyContext(
        dataclasses.replace(config, contenders=kept), _workdir(), shard
    )
    check_settings(folder, context)  # Before tuning, which is slow.
    if DRAFTING & set(find_study(name).measures):
        tune(context)
    before = check_header(folder, context)
    now = {
        "command": _command(),
        "date": provenance.today(),
        "device": provenance.device(),
        "versions": provenance.versions(),
    }
    sessions = list(before.get("sessions", []))
    facts = {
        **merge_facts(before, facts_of(context)),
        "left_out": left_out,
        "gin": text,
    }
    if in_domain:
        facts["in_domain"] = in_domain

    def write() -> None:
        hosts.first(write_header)

    def write_header() -> None:
        if (folder / run_files.HEADER).is_file():
            # Programs of other shards also write this file.
            for known in run_files.read_header(folder).get("sessions", []):
                if known not in sessions:
                    sessions.append(known)
        latest = sessions[-1] if sessions else now
        run_files.write_header(folder, name, {**latest, **facts, "sessions": sessions})

    def keep(records: Iterable[Record]) -> None:
        new = list(records)
        if new and now not in sessions:
            sessions.append(now)
            write()
        name = f"records{context.shard_suffix}.jsonl"
        hosts.first(lambda: run_files.append_records(folder, new, name))

    write()
    run = run_files.open_run(folder)
    hosts.agree(None)  # Nothing is appended before all processes have read it.
    measure(find_study(name), context, run, keep)


def _command() -> str:
    """The command, without local paths."""
    text = "\0".join(sys.argv[1:])
    text = re.sub(r"(^|\0)--?(data|workdir)[=\0][^\0]*", r"\1--\2=FOLDER", text)
    words = text.split("\0")
    return shlex.join(["python", "-m", "experiments.run", *words])


if __name__ == "__main__":
    process_flags.run(main, positional=True)
