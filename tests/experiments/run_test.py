"""`python -m experiments.run` on a model that takes seconds to train."""

import dataclasses
import itertools
import json
import pathlib
import shutil

import jax
import pytest

from bpd_jax import configuration
from bpd_jax.data.row_sources import Shard
from bpd_jax.decoding.decoder import GREEDY
from bpd_jax.decoding.loaded_model import Chat
from bpd_jax.errors import UserError
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.drafter_files import save_drafter
from bpd_jax.models.drafter_functions import DrafterFunctions
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.studies import run_files
from bpd_jax.studies.in_domain import build_in_domain
from bpd_jax.studies.measure_drafts import draft_records, oracle_records
from bpd_jax.studies.measure_explorer import explorer_records
from bpd_jax.studies.measure_quality import plain_text
from bpd_jax.studies.measurements import MEASUREMENTS
from bpd_jax.studies.run_files import open_run
from bpd_jax.studies.run_header import check_header, facts_of, merge_facts
from bpd_jax.studies.study_catalog import NAMES
from bpd_jax.studies.study_config import StudyConfig
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import (
    DraftRecord,
    ExplorerRecord,
    OracleRecord,
    TimingRecord,
)
from bpd_jax.studies.text_files import content_digest
from bpd_jax.studies.tuning import tune

ROOT = pathlib.Path(__file__).parent.parent.parent
SIZES = ("tiny", "small", "smollm2", "paper")
FILES = [
    path
    for name in NAMES
    for size in SIZES
    if (path := ROOT / "experiments" / name / f"{size}.gin").is_file()
]


def bindings(trained: pathlib.Path) -> list[str]:
    """Settings that fit the small model."""
    return [
        f"--gin.StudyConfig.model={str(trained / 'run')!r}",
        f"--gin.StudyConfig.assets={{'own_2': {{'ngram': '{trained / 'run/ngram'}'}}}}",
        "--gin.StudyConfig.max_new_tokens=12",
        "--gin.StudyConfig.longest_prompt=16",
        "--gin.StudyConfig.lattice_width=4",
    ]


@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_gin_file_is_a_study(path):
    found = configuration.parse(
        [path], [f"StudyConfig.study={path.parent.name!r}"], StudyConfig
    )
    assert found.value.tasks
    assert found.value.parsed


def test_every_study_has_a_size_of_smollm2():
    assert [path.parent.name for path in FILES if path.stem == "smollm2"] == list(NAMES)


@pytest.fixture(scope="module")
def context(trained, tmp_path_factory):
    config = StudyConfig(
        study="table4",
        model=str(trained / "run"),
        tasks=["held_out"],
        contenders=["bpd", "ngram:2"],
        examples=2,
        tune=1,
        max_new_tokens=12,
        longest_prompt=16,
        lattice_width=4,
    )
    return StudyContext(config, tmp_path_factory.mktemp("context"))


@pytest.fixture(scope="module")
def with_drafter(context, trained, tmp_path_factory):
    """The same study of the model with a random block drafter, which is its source."""
    folder = tmp_path_factory.mktemp("with_drafter") / "run"
    shutil.copytree(trained / "run", folder)
    loaded = context.loaded("held_out")
    trunk = loaded.functions.config.trunk
    config = BlockDrafterConfig((0,), block_size=5).resolve(trunk)
    save_drafter(
        folder / "drafter",
        config,
        DrafterFunctions(config, trunk).init(jax.random.key(0)),
        base=loaded.fingerprint,
        base_name="run",
        d_model=trunk.d_model,
        vocab_size=trunk.vocab_size,
        facts={},
    )
    config = dataclasses.replace(context.config, model=str(folder), source="block")
    return StudyContext(config, tmp_path_factory.mktemp("with_drafter_texts"))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["heads", "block"])
def test_records_are_what_decoding_does(context, with_drafter, source):
    """Tokens and calls of the records are those of the loop with the model in it."""
    context = context if source == "heads" else with_drafter
    examples = context.examples("held_out")
    assert [example.part for example in examples] == ["tune", "report", "report"]
    prompts = [example.input_ids for example in examples]
    options = context.options("held_out")
    for name in context.config.contenders:
        (found,) = draft_records(context, name, ["held_out"])
        decoder, method = context.contender(name, "held_out")
        assert method.source.name == source
        real = decoder.decode(method, prompts, options)
        for record, generation in zip(found, real, strict=True):
            assert record.tokens == len(generation.output_ids)
            assert record.calls == generation.serial_calls
            assert record.nodes == generation.nodes.sum()
    plain = context.contender("bpd", "held_out")[0].decode(GREEDY, prompts, options)
    texts = context.texts("held_out")
    for text, generation in zip(texts, plain, strict=True):
        assert text.output_ids.tolist() == generation.output_ids.tolist()


@pytest.mark.slow
def test_texts_are_kept_and_made_anew_for_other_settings(context, trained):
    first = [text.output_ids.tolist() for text in context.texts("held_out")]
    again = StudyContext(context.config, context.workdir)
    path = context.workdir / "texts" / "held_out.npz"
    before = path.stat().st_mtime_ns
    assert [text.output_ids.tolist() for text in again.texts("held_out")] == first
    assert path.stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize("source", ["heads", "block"])
def test_the_oracle_grid_is_the_oracle(context, with_drafter, source):
    """Its last entry is what the oracle drafter does in the loop."""
    context = context if source == "heads" else with_drafter
    found = oracle_records(context, "held_out")
    decoder, oracle = context.contender("oracle", "held_out")
    prompts = [example.input_ids for example in context.examples("held_out")]
    real = decoder.decode(oracle, prompts, context.options("held_out"))
    assert [record.calls[-1][-1] for record in found] == [g.serial_calls for g in real]
    assert len(found[0].calls) == {"heads": 3, "block": 4}[source]


@pytest.mark.slow
def test_the_explorer_has_all_that_was_drafted(context):
    """Its calls follow each other through the text, with what each could choose."""
    (record, *_) = records = explorer_records(context, "held_out", ["bpd", "oracle"], 1)
    assert len(records) == 1
    example = context.examples("held_out")[record.example]
    assert example.part == "report"
    text = context.texts("held_out")[record.example]
    tokenizer = context.loaded("held_out").tokenizer
    pieces = [tokenizer.piece(token) for token in text.output_ids]
    assert [record.pieces[number] for number in record.output] == pieces
    assert len(record.candidates) == len(record.log_probs) == len(pieces)
    for trace in record.traces:
        position = 0
        for call in trace.calls:
            assert call.at == position
            accepted = call.winner[: call.accepted]
            assert accepted == record.output[position : position + call.accepted]
            position += call.accepted
        assert position == len(pieces)
    bpd = record.traces[0].calls[0]
    assert bpd.draft[1:] == [head[0] for head in record.candidates[0]]


@pytest.mark.slow
def test_in_domain_models_are_counted_from_other_texts(trained, tmp_path):
    """Of ten dialogues four are drawn; the n-grams are those of the other six."""
    (tmp_path / "samsum").mkdir()
    lines = [
        json.dumps({"dialogue": f"{n} times {n}?", "summary": f"is {n * n}."})
        for n in range(10)
    ]
    (tmp_path / "samsum" / "test.jsonl").write_text("".join(f"{x}\n" for x in lines))
    config = StudyConfig(
        study="table7",
        model=str(trained / "run"),
        data=str(tmp_path),
        tasks=["samsum"],
        contenders=["ngram:1@in_domain"],
        assets={"in_domain": {"ngram": f"{tmp_path}/in_domain/{{task}}"}},
        examples=3,
        tune=1,
        max_new_tokens=8,
        longest_prompt=60,
        lattice_width=4,
        in_domain=100,
    )
    context = StudyContext(config, tmp_path)
    folder = tmp_path / "in_domain" / "samsum"
    facts = build_in_domain(StudyContext(config, tmp_path, Shard(1, 2)), "samsum")
    drawn = [example.prompt for example in context.examples("samsum")]
    assert len(drawn) == 4
    model = load_model(str(folder), vocab_size=context.loaded("samsum").vocab_size)
    rest = [n for n in range(10) if not any(f"{n} times" in one for one in drawn)]
    assert len(rest) == facts["texts"] == 6  # whatever the shard
    tokenizer = context.loaded("samsum").tokenizer
    counted = {
        pair
        for n in rest
        for ids in [
            tokenizer.encode(
                f"Here is a dialogue: {n} times {n}?\nWrite a short summary!\n"
                f"is {n * n}."
            )
        ]
        for pair in itertools.pairwise(ids)
    }
    # Beside them stand those with the ends of texts.
    inner = [
        key
        for key in model.ngrams(2)
        if all(token < tokenizer.vocab_size for token in key)
    ]
    assert counted <= {tuple(key) for key in inner}
    assert context.depends_on_task("ngram:1@in_domain")
    (found,) = draft_records(context, "ngram:1@in_domain", ["samsum"])
    assert [record.part for record in found] == ["tune"] + ["report"] * 3
    before = (folder / "in_domain.json").stat().st_mtime_ns
    assert build_in_domain(context, "samsum") == facts
    assert (folder / "in_domain.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_weights_are_tuned_by_task(context, tmp_path, trained):
    """By the text to tune on alone, and for all contenders that name no weight."""
    config = dataclasses.replace(
        context.config,
        contenders=["bpd", "ngram:2", "ngram:1:alpha=1"],
        tuners={"ngram": "ngram:1", "neural": "neural:1"},
        alphas=(0, 1, 20),
    )
    assert config.same_texts({"settings": context.config.settings})
    mine = StudyContext(config, tmp_path)
    plain = mine.made_with("ngram:2")
    tune(mine)
    calls = {}
    for alpha in (0, 1, 20):
        (found,) = draft_records(mine, f"ngram:1:alpha={alpha}", ["held_out"])
        calls[alpha] = sum(r.calls for r in found if r.part == "tune")
    best = min(calls, key=lambda alpha: (calls[alpha], abs(alpha - 1)))
    assert mine.alphas == {"ngram": {"held_out": best}}  # there is no neural rescorer
    assert mine.contender("ngram:2", "held_out")[1].setting("alpha") == best
    assert mine.contender("ngram:1:alpha=1", "held_out")[1].setting("alpha") == 1
    assert mine.contender("medusa:4", "held_out")[1].setting("alpha") is None
    assert mine.made_with("ngram:2") != plain
    assert "alpha" not in mine.label("ngram:2").lower()
    assert facts_of(mine)["alphas"] == mine.alphas
    # Another study, or a shard of one, finds what was tuned.
    (path,) = (tmp_path / "alphas").iterdir()
    written = json.loads(path.read_text())
    assert (written["examples"], written["alpha"]) == (1, best)
    path.write_text(json.dumps({**written, "alpha": 7}))
    for shard in (Shard(0, 1), Shard(1, 2)):
        other = StudyContext(dataclasses.replace(config, examples=1), tmp_path, shard)
        tune(other)
        assert other.alphas == {"ngram": {"held_out": 7}}
    # Other weights are another question.
    more = StudyContext(dataclasses.replace(config, alphas=(1,)), tmp_path)
    tune(more)
    assert more.alphas == {"ngram": {"held_out": 1}}


@pytest.mark.slow
def test_second_turns_follow_what_the_model_answered(trained, tmp_path):
    (tmp_path / "spec_bench").mkdir()
    records = [
        {"category": "math", "turns": [f"{n} times {n}?", "and then?"]}
        for n in range(3)
    ]
    path = tmp_path / "spec_bench" / "test.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = StudyConfig(
        study="table_e",
        model=str(trained / "run"),
        data=str(tmp_path),
        tasks=["math"],
        contenders=["bpd"],
        examples=2,
        tune=1,
        turns=2,
        max_new_tokens=6,
    )
    context = StudyContext(config, tmp_path)
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}|{% endfor %}"
    talking = dataclasses.replace(context.loaded("math"), chat=Chat(template))
    context._models = {config.model: talking}
    found = context.examples("math")
    assert [example.index for example in found] == list(range(6))
    assert [example.part for example in found] == ["tune", "report", "report"] * 2
    decoder, _ = context.contender("greedy", "math")
    first = [example.input_ids for example in found[:3]]
    answers = decoder.decode(GREEDY, first, context.options("math"))
    decode = talking.tokenizer.decode
    for before, later, answer in zip(found, found[3:], answers, strict=False):
        said = plain_text(answer.output_ids, decode, talking.end_tokens)
        assert said
        assert decode(later.input_ids) == (
            f"user {before.prompt}|assistant {said}|user and then?|"
        )
    # Records of before there were turns are those of first ones.
    settings = {k: v for k, v in config.settings.items() if k != "turns"}
    assert config.differing(settings) == {"turns": 1}


@pytest.mark.slow
def test_lengths_by_task_and_positions_that_the_model_has(trained, tmp_path):
    config = StudyConfig(
        study="table4",
        model=str(trained / "run"),
        tasks=["held_out"],
        contenders=["bpd"],
        examples=1,
        tune=0,
        max_new_tokens=5,
        decode_lengths={"held_out": 9, "squad": 3},
        longest_prompt=100_000,
    )
    context = StudyContext(config, tmp_path)
    functions = context.loaded("held_out").functions
    (example,) = context.examples("held_out")
    (text,) = context.texts("held_out")
    assert len(text.output_ids) == 9
    positions = functions.config.trunk.max_length
    assert len(example.input_ids) <= positions - 9 - functions.block_size
    long = dataclasses.replace(config, decode_lengths={"held_out": positions})
    with pytest.raises(UserError, match="no positions left for a prompt"):
        StudyContext(long, tmp_path / "long").examples("held_out")


@pytest.mark.slow
def test_shards_make_all_records_of_every_kind(trained, tmp_path):
    """A shard that comes second finds its own examples missing; a third has none."""
    config = StudyConfig(
        study="figure6",
        model=str(trained / "run"),
        tasks=["held_out"],
        contenders=["bpd"],
        examples=2,
        tune=1,
        max_new_tokens=6,
        longest_prompt=16,
        lattice_width=4,
        shown=2,
    )
    run_files.write_header(tmp_path, "figure6", {})
    for shard in (Shard(0, 2), Shard(1, 2), Shard(0, 1)):
        context = StudyContext(config, tmp_path, shard)

        def keep(records, context=context):
            name = f"records{context.shard_suffix}.jsonl"
            run_files.append_records(tmp_path, list(records), name)

        for kind in ("oracle", "drafts", "explorer"):
            MEASUREMENTS[kind](context, open_run(tmp_path), keep)
    found = open_run(tmp_path).records
    for kind, examples in ((OracleRecord, 3), (DraftRecord, 3), (ExplorerRecord, 2)):
        assert sum(isinstance(record, kind) for record in found) == examples
    assert not (tmp_path / "texts" / "held_out.npz").exists()  # none was needed


@pytest.mark.slow
def test_a_header_tells_other_texts_and_other_models(context, trained, tmp_path):
    facts = facts_of(context)
    run_files.write_header(tmp_path, "table4", facts)
    assert check_header(tmp_path, context)["size"] == ""
    changes = {
        "texts": {"held_out": "other"},
        "made_with": {"ngram:2": "other"},
        "settings": {**facts["settings"], "max_new_tokens": 99},
    }
    for name, value in changes.items():
        run_files.write_header(tmp_path, "table4", {**facts, name: value})
        with pytest.raises(UserError, match="choose another --workdir, or remove"):
            check_header(tmp_path, context)
    # Plain BPD drafts with no model but the one that decodes.
    assert context.made_with("bpd") == context.made_with("medusa:4")
    assert context.made_with("ngram:2") == context.made_with("medusa_ngram:4")
    assert len({context.made_with(name) for name in ("bpd", "ngram:2")}) == 2
    copied = tmp_path / "copy"
    shutil.copytree(trained / "run" / "ngram", copied)
    assert content_digest(copied) == content_digest(trained / "run" / "ngram")
    path = next(copied.glob("log_probs_1.npy"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert content_digest(copied) != content_digest(trained / "run" / "ngram")
    # Of large files the beginning and the end are read.
    large = tmp_path / "large"
    large.write_bytes(bytes(5 << 20))
    before = content_digest(large)
    large.write_bytes(bytes((5 << 20) - 1) + b"x")
    assert content_digest(large) != before


@pytest.mark.slow
def test_what_a_start_leaves_out_is_not_forgotten(context, tmp_path):
    """Records of a contender remain, and are refused if it is another one later."""
    made = {"markov:1": "first", "bpd": context.made_with("bpd")}
    before = {**facts_of(context), "made_with": made, "labels": {"markov:1": "Markov"}}
    now = merge_facts(before, facts_of(context))
    assert now["made_with"]["markov:1"] == "first"
    assert now["labels"]["markov:1"] == "Markov"
    assert now["made_with"]["bpd"] == context.made_with("bpd")
    assert merge_facts({}, facts_of(context)) == facts_of(context)


def test_times_of_two_machines_are_refused(tmp_path):
    record = TimingRecord("qa", 0, "bpd", 0.0, 0, 8, 4, 1.0, True)
    config = StudyConfig("table_e", model="m", tasks=["qa"], contenders=["bpd"])
    context = StudyContext(config, tmp_path)
    session = {"device": "another", "command": "", "date": "", "versions": {}}
    run_files.write_header(tmp_path, "table_e", {"sessions": [session]})
    run_files.append_records(tmp_path, [record])
    with pytest.raises(UserError, match="another device"):
        MEASUREMENTS["timing"](context, open_run(tmp_path), lambda records: None)


@pytest.mark.slow
def test_a_study_runs_goes_on_and_is_published(dry_run, trained, tmp_path):
    """Two shards, then the whole, which has nothing left to do."""
    workdir = f"--workdir={tmp_path}"
    command = ["table4", "--size=tiny", "--limit=2", workdir, *bindings(trained)]
    shards = [[*command, f"--shard={index}/2"] for index in range(2)]
    done = dry_run("experiments.run", *shards, command, ["table4", "--size=big"])
    assert [end.returncode for end in done] == [0, 0, 0, 1], done
    assert "left out: neural:1:" in done[2].stdout
    assert "Block efficiency" in done[2].stdout
    assert "error: table4 has no size 'big'" in done[3].stderr
    run = open_run(tmp_path / "table4")
    assert len(run.facts["sessions"]) == 2  # the third made nothing
    assert sorted(path.name for path in (tmp_path / "table4").iterdir()) == [
        "records-0-of-2.jsonl",
        "records-1-of-2.jsonl",
        "study.json",
    ]
    places = [(r.contender, r.example) for r in run.of(DraftRecord)]
    assert len(places) == len(set(places)) == 4 * len(run.facts["labels"])
    assert run.facts["left_out"].keys() >= {"neural:1"}
    assert "table4" in run.facts["command"]
    assert str(tmp_path) not in json.dumps(run.facts["command"])


@pytest.mark.slow
def test_results_of_other_settings_are_not_mixed(dry_run, trained, tmp_path):
    folder = tmp_path / "table4"
    folder.mkdir()
    (folder / "study.json").write_text(
        json.dumps({"study": "table4", "settings": {"max_new_tokens": 99}})
    )
    command = ["table4", "--size=tiny", f"--workdir={tmp_path}", *bindings(trained)]
    (end, *wrong) = dry_run(
        "experiments.run",
        command,
        [],
        ["tabel4", "--size=tiny"],
        [*command, "--shard=2/2"],
    )
    assert end.returncode == 1
    assert "choose another --workdir, or remove" in end.stderr
    assert [one.returncode for one in wrong] == [1, 1, 1]
    assert "name a study: table1" in wrong[0].stderr
    assert "did you mean table4?" in wrong[1].stderr
    assert "--shard=2/2 is not I/N" in wrong[2].stderr
