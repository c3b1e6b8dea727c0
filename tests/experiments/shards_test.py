"""`python -m experiments.run` on a model that trains in seconds, also in shards."""

import json

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.row_sources import Shard
from bpd_jax.studies import run_files
from bpd_jax.studies.missing_records import measure
from bpd_jax.studies.run_files import open_run
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import (
    DraftRecord,
    ExplorerRecord,
    OracleRecord,
    TimingRecord,
)
from experiments.catalog import find_study
from tests.commands import assert_all_refused, start
from tests.experiments.small_studies import bindings, config_of


def test_shards_make_all_records_of_every_kind(trained, tmp_path):
    """The second shard adds its own examples; a third run finds none missing.

    Two of the three examples are reported; only Table 8 has drafts along the other one.
    """
    config = config_of(trained, shown=2)
    run_files.write_header(tmp_path, "figure6", {})
    for shard in (Shard(0, 2), Shard(1, 2), Shard(0, 1)):
        context = StudyContext(config, tmp_path, shard)

        def keep(records, context=context):
            name = f"records{context.shard_suffix}.jsonl"
            run_files.append_records(tmp_path, list(records), name)

        for study in ("figure6", "figure4"):
            measure(find_study(study), context, open_run(tmp_path), keep)
    stored_records = open_run(tmp_path).records
    for kind, examples in ((OracleRecord, 3), (DraftRecord, 2), (ExplorerRecord, 2)):
        assert sum(isinstance(record, kind) for record in stored_records) == examples
    assert len(list((tmp_path / "texts").iterdir())) == 2  # those of the two shards
    table8, stored = tmp_path / "table8", []
    run_files.write_header(table8, "table8", {})
    measure(find_study("table8"), context, open_run(table8), stored.extend)
    assert [record.part for record in stored].count("tune") == 1
    assert len(stored) == 3


def test_times_of_two_machines_are_refused(tmp_path):
    record = TimingRecord("qa", 0, "bpd", 0.0, 0, 8, 4, 1.0, True)
    config = StudyConfig("table_e", model="m", tasks=["qa"], contenders=["bpd"])
    context = StudyContext(config, tmp_path)
    session = {"device": "another", "command": "", "date": "", "versions": {}}
    run_files.write_header(tmp_path, "table_e", {"sessions": [session]})
    run_files.append_records(tmp_path, [record])
    with pytest.raises(UserError, match="another device"):
        measure(find_study("table_e"), context, open_run(tmp_path), list)


def test_study_in_shards_is_completed_by_one_run(trained, tmp_path):
    """Two shards, then a run without shards, which has nothing left to do."""
    workdir = f"--workdir={tmp_path}"
    contenders = "--gin.StudyConfig.contenders=['bpd', 'ngram:1', 'neural:1']"
    command = ["table4", "--size=tiny", "--limit=2", workdir, *bindings(trained)]
    command.append(contenders)
    shards = [[*command, f"--shard={index}/2"] for index in range(2)]
    results = start("experiments.run", *shards, command)
    assert [result.returncode for result in results] == [0, 0, 0], results
    assert "left out: neural:1:" in results[2].stdout
    assert "Block efficiency" in results[2].stdout
    run = open_run(tmp_path / "table4")
    assert len(run.facts["sessions"]) == 2  # the third made nothing
    names = sorted(path.name for path in (tmp_path / "table4").iterdir())
    assert names == [*(f"records-{n}-of-2.jsonl" for n in (0, 1)), "study.json"]
    keys = [(r.contender, r.example) for r in run.of(DraftRecord)]
    # Two of four examples are reported.
    assert len(keys) == len(set(keys)) == 2 * len(run.facts["labels"])
    assert run.facts["left_out"].keys() >= {"neural:1"}
    assert "table4" in run.facts["command"]
    assert str(tmp_path) not in json.dumps(run.facts["command"])


def test_results_of_other_settings_are_not_mixed(trained, tmp_path):
    folder = tmp_path / "table4"
    folder.mkdir()
    other = {"study": "table4", "settings": {"max_new_tokens": 99}}
    (folder / "study.json").write_text(json.dumps(other))
    command = ["table4", "--size=tiny", f"--workdir={tmp_path}", *bindings(trained)]
    cases = [
        (command, "choose another --workdir, or remove"),
        ([], "name a study: table1"),
        (["tabel4", "--size=tiny"], "did you mean table4?"),
        ([*command, "--shard=2/2"], "--shard=2/2 is not I/N"),
        (["all", "--size=big"], "table1 has no size 'big'"),
    ]
    assert_all_refused("experiments.run", cases, tmp_path)
