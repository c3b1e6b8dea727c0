"""Regenerates tables and figures of the paper.

    python -m experiments.run table4 --size=smollm2 --data=FOLDER
    python -m experiments.run table4 figure6 --size=smollm2 --data=FOLDER --limit=4
    python -m experiments.run all --size=tiny

Every study has a folder here with a gin file for each size. Texts are decoded once per
model and task and kept; methods are replayed on them. Results go to
`WORKDIR/STUDY/`: the configuration, versions and device (`study.json`) and the raw
records of every example (`records.jsonl`), from which `bpd_jax.report WORKDIR` draws
everything. A run that is stopped goes on with the same command.

`--shard=I/N` does every N-th example, so that N programs, one per device or host, share
the work on one WORKDIR. `--publish` writes the results to `experiments/STUDY/results/`.
"""

import dataclasses
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable

from absl import flags

from bpd_jax import cli, configuration, files, progress
from bpd_jax.configuration import Parsed
from bpd_jax.data.row_sources import WHOLE, Shard
from bpd_jax.errors import UserError
from bpd_jax.evaluation.hardware import model_size
from bpd_jax.models.config import BlockwiseConfig
from bpd_jax.reporting import build
from bpd_jax.reporting.exhibit_terminal import print_exhibit
from bpd_jax.reporting.records import Facts, Record
from bpd_jax.studies import run_files, study
from bpd_jax.studies.bench import Bench
from bpd_jax.studies.catalog import NAMES, find_study
from bpd_jax.studies.config import StudyConfig
from bpd_jax.studies.in_domain import build_in_domain
from bpd_jax.studies.tasks import HELD_OUT, LABELS
from bpd_jax.studies.work import WORK

SIZE = flags.DEFINE_string("size", "tiny", "tiny, smollm2 or paper: which gin file.")
DATA = flags.DEFINE_string(
    "data", None, "Folder of the tasks as JSON Lines: NAME/SPLIT.jsonl.gz."
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the results; default: runs/paper/SIZE."
)
LIMIT = flags.DEFINE_integer(
    "limit", None, "Only so many examples of each task, for a quick look."
)
SHARD = flags.DEFINE_string("shard", None, "I/N: only examples I, I + N, I + 2 N, ….")
PUBLISH = flags.DEFINE_bool(
    "publish",
    False,
    "Measure nothing; write results to experiments/STUDY/results/SIZE.",
)

_HERE = pathlib.Path(__file__).parent


def main(names: list[str]) -> None:
    """Does one study after the other."""
    chosen = _chosen(names)
    parsed = {name: _configure(name) for name in chosen}
    shard = _shard()
    for name in chosen:
        config = parsed[name].value
        folder = _workdir() / name
        if PUBLISH.value:
            _publish(folder, _HERE / name / "results" / SIZE.value)
            continue
        _check_settings(folder, config)
        left_out = _unavailable(Bench(config, _workdir(), shard))
        kept = [c for c in config.contenders if c not in left_out]
        config = dataclasses.replace(config, contenders=kept)
        bench = Bench(config, _workdir(), shard)
        _measure(name, bench, parsed[name].text, left_out)
        if shard == WHOLE:
            run = run_files.open_run(folder)
            print_exhibit(find_study(name).exhibit(run))
            print(f"results: {folder}")
    if not PUBLISH.value:
        print(f"report:  python -m bpd_jax.report {_workdir()}")


def _chosen(names: list[str]) -> list[str]:
    if not names:
        raise UserError(f"name a study: {', '.join(NAMES)}; or all.")
    if names == ["all"]:
        return [name for name in NAMES if _gin_file(name).is_file()]
    for name in names:
        find_study(name)
        if not _gin_file(name).is_file():
            sizes = sorted(path.stem for path in (_HERE / name).glob("*.gin"))
            raise UserError(
                f"{name} has no size {SIZE.value!r}: there is {', '.join(sizes)}."
            )
    return list(dict.fromkeys(names))


def _gin_file(name: str) -> pathlib.Path:
    return _HERE / name / f"{SIZE.value}.gin"


def _workdir() -> pathlib.Path:
    if WORKDIR.value:
        return pathlib.Path(WORKDIR.value)
    limit = "" if LIMIT.value is None else f"_limit{LIMIT.value}"
    return pathlib.Path("runs", "paper", SIZE.value + limit)


def _configure(name: str) -> Parsed[StudyConfig]:
    """What gin says of a study, and the flags."""
    paths = [f"experiments/{name}/{SIZE.value}.gin", *flags.FLAGS.gin_file]
    given = [f"StudyConfig.study = {name!r}", f"StudyConfig.size = {SIZE.value!r}"]
    if DATA.value:
        given.append(f"StudyConfig.data = {DATA.value!r}")
    parsed = configuration.parse(
        paths, [*given, *flags.FLAGS.gin_bindings], StudyConfig
    )
    config = parsed.value
    if LIMIT.value is not None:
        tune = min(LIMIT.value, config.tune)
        config = dataclasses.replace(config, examples=LIMIT.value, tune=tune)
    # What a folder may be called differently in is the folder of the results.
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
    found = re.fullmatch(r"(\d+)/(\d+)", SHARD.value, re.ASCII)
    if found is None or not int(found[1]) < int(found[2]):
        raise UserError(f"--shard={SHARD.value} is not I/N with I from 0 to N - 1.")
    return Shard(int(found[1]), int(found[2]))


def _check_settings(folder: pathlib.Path, config: StudyConfig) -> None:
    """Raises a `UserError` if the folder holds results of other settings."""
    if not (folder / run_files.HEADER).is_file():
        return
    before, now = run_files.read_header(folder).get("settings", {}), config.settings
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"{folder} holds results with {name} = {before.get(name)!r}, not "
                f"{value!r}: name another --workdir, or remove it."
            )


def _unavailable(bench: Bench) -> dict[str, str]:
    """Contenders whose models are not there, with the reason, which is printed."""
    found = {}
    for contender in bench.config.parsed:
        if bench.depends_on_task(contender.name):
            continue
        try:
            decoder, method = bench.contender(contender.name, bench.config.tasks[0])
            decoder.drafter(method)
        except UserError as error:
            found[contender.name] = str(error)
            print(f"left out: {contender.name}: {error}")
    if len(found) == len(bench.config.contenders) > 0:
        raise UserError("no contender is left: see above for what each lacks.")
    return found


def _measure(name: str, bench: Bench, text: str, left_out: Facts) -> None:
    """Makes what is missing of a study's records."""
    config, folder = bench.config, bench.workdir / name
    files.check_writable(folder, folder=True)
    folder.mkdir(parents=True, exist_ok=True)
    for task in config.tasks:
        if config.in_domain and task != HELD_OUT:
            build_in_domain(bench, task)
    _decode_texts(name, bench)
    run_files.write_header(
        folder, name, {**_facts(bench), "left_out": left_out, "gin": text}
    )
    file = f"records{bench.shard_suffix}.jsonl"
    run = run_files.open_run(folder)

    def keep(records: Iterable[Record]) -> None:
        run_files.append_records(folder, list(records), file)

    for kind in find_study(name).measures:
        WORK[kind](bench, run, keep)


def _decode_texts(name: str, bench: Bench) -> None:
    """Decodes and records the texts of all tasks, if any kind of record needs them."""
    if set(find_study(name).measures) <= {study.TIMING, study.LATENCY}:
        return
    examples = sum(len(bench.examples(task)) for task in bench.config.tasks)
    total = 2 * examples * bench.config.max_new_tokens
    with progress.bar(label="decoding", total=total, unit=" tokens") as bar:
        for task in bench.config.tasks:
            bar.set_postfix_str(task, refresh=False)
            bench.texts(task, bar.update)


def _facts(bench: Bench) -> Facts:
    config = bench.config
    loaded = bench.loaded(config.tasks[0])
    trunk = loaded.functions.config.trunk
    return {
        "size": config.size,
        "command": _command(),
        "date": build.today(),
        "device": build.device(),
        "versions": build.versions(),
        "model": config.model,
        "model_sizes": _sizes(bench),
        "trunk": f"{trunk.num_layers} layers, {trunk.d_model} / {trunk.d_ff} wide",
        "heads": loaded.functions.block_size,
        "examples": {
            task: {
                part: sum(example.part == part for example in bench.examples(task))
                for part in ("report", "tune")
            }
            for task in config.tasks
        },
        "settings": config.settings,
        "assets": {name: dict(models) for name, models in config.assets.items()},
        "tasks": {task: LABELS[task] for task in config.tasks},
        "labels": {name: bench.label(name) for name in config.contenders},
        "printed": dict(config.printed),
    }


def _sizes(bench: Bench) -> Facts:
    """Sizes of the models, for the analytical model of Table 11."""
    task = bench.config.tasks[0]
    rescorers, ngrams = {}, {}
    for contender in bench.config.parsed:
        assets = bench.contender(contender.name, task)[0].assets
        if assets.rescorer is not None:
            rescorers[contender.assets or ""] = _size(assets.rescorer.functions.config)
        if assets.ngram is not None:
            ngrams[contender.assets or ""] = sum(assets.ngram.sizes)
    model = _size(bench.loaded(task).functions.config)
    return {"model": model, "rescorers": rescorers, "ngrams": ngrams}


def _size(config: BlockwiseConfig) -> Facts:
    return dataclasses.asdict(model_size(config))


def _command() -> str:
    """The command, without folders of this machine."""
    words = [
        re.sub(r"^--(data|workdir)=.*", r"--\1=FOLDER", word) for word in sys.argv[1:]
    ]
    return shlex.join(["python", "-m", "experiments.run", *words])


def _publish(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Copies results to where they are kept."""
    run = run_files.open_run(folder)
    run_files.publish(run, output)
    print(f"{len(run.records)} records: {output}")


if __name__ == "__main__":
    cli.run(main, positional=True)
