"""What studies of a model that trains in seconds record, and what they refuse."""

import dataclasses
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bpd_jax import api
from bpd_jax.base.errors import UserError
from bpd_jax.data.row_sources import Shard
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loaded_model import Chat
from bpd_jax.decoding.recording import padded_sizes, record_text
from bpd_jax.models.candidates import entropy
from bpd_jax.models.drafter_config import BlockDrafterConfig
from bpd_jax.models.segment_attention import Segments
from bpd_jax.ngrams.formats.load_model import load_model
from bpd_jax.studies import run_files
from bpd_jax.studies.measure_drafts import (
    draft_records,
    engine_records,
    entropy_records,
)
from bpd_jax.studies.measure_texts import explorer_records
from bpd_jax.studies.missing_records import measure
from bpd_jax.studies.run_header import check_header, facts_of
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.study_records import ENTROPY_STEP, REPORT, from_digits
from bpd_jax.studies.tasks import plain_text
from bpd_jax.studies.text_files import content_digest
from bpd_jax.studies.tuning import tune
from experiments.catalog import find_study
from experiments.table7.in_domain import build_in_domain
from tests.decoding.random_models import save_random_drafter
from tests.experiments.small_studies import config_of
from tests.json_lines import write_json_lines

TASKS = ["held_out"]


@pytest.fixture(scope="module")
def context(trained, tmp_path_factory):
    config = config_of(trained, contenders=["bpd", "ngram:2"], max_new_tokens=12)
    return StudyContext(config, tmp_path_factory.mktemp("context"))


def test_studies_and_other_commands_decode_with_the_same_parameters(context, trained):
    """Otherwise studies and `evaluate` would time different kernels on a CPU."""
    lm = api.load(str(trained / "run"))
    decoder, _ = context.contender("bpd", "held_out")
    assert jax.tree.structure(decoder.model) == jax.tree.structure(lm.model)


def test_header_describes_the_source_that_drafts(context, trained, tmp_path):
    loaded = context.loaded("held_out")
    facts = facts_of(context)
    assert facts["heads"] == loaded.config.block_size != 5
    assert facts["draft_vocabulary"] == loaded.config.draft_vocab_size
    # The same study with a random block drafter.
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    drafter = BlockDrafterConfig((0,), block_size=5, draft_vocabulary=32)
    save_random_drafter(folder / "drafter", loaded, drafter)
    config = dataclasses.replace(context.config, model=str(folder), source="block")
    facts = facts_of(StudyContext(config, tmp_path))
    assert (facts["heads"], facts["draft_vocabulary"]) == (5, 32)
    assert facts["vocabulary"] > 32


def test_records_equal_those_of_decoding(context):
    examples = context.examples("held_out")
    assert [example.part for example in examples] == ["tune", "report", "report"]
    prompts = [example.input_ids for example in examples]
    options = context.options("held_out")
    [records] = draft_records(context, "bpd", ["held_out"])
    decoder, method = context.contender("bpd", "held_out")
    assert method.source.name == "heads"
    generations = decoder.decode(method, prompts, options)
    for record, generation in zip(records, generations, strict=True):
        assert record.tokens == len(generation.output_ids)
        assert record.calls == generation.serial_calls
        assert record.nodes == generation.nodes.sum()
    for record in records:
        # Every position has an entropy of each head.
        counts = [from_digits(counts).sum() for counts in record.entropy_counts]
        assert counts == [record.tokens] * len(record.head_entropy) != []
    entropies = entropy_records(context, "held_out")
    for record, text in zip(entropies, context.texts("held_out"), strict=True):
        error = np.abs(record.entropies.T - text.entropies[:, 1:])
        assert error.max() <= ENTROPY_STEP / 2 + 1e-6
    plain = context.contender("bpd", "held_out")[0].decode(GREEDY, prompts, options)
    texts = context.texts("held_out")
    for text, generation in zip(texts, plain, strict=True):
        assert text.output_ids.tolist() == generation.output_ids.tolist()


def test_head_1_has_the_entropy_of_the_draft_vocabulary(context, trained, tmp_path):
    """Its distribution over these tokens, renormalised."""
    loaded = context.loaded("held_out")
    heads = dataclasses.replace(loaded.config.heads, draft_vocabulary=8)
    tokens = np.array([3, 1, 4, 15, 9, 2, 6, 5])
    params = {**loaded.model.params}
    rows = jnp.zeros((len(tokens), loaded.config.trunk.d_model))
    own = {"vocabulary": jnp.asarray(tokens), "softmax": rows}
    params["heads"] = {**params["heads"], **own}
    config = dataclasses.replace(loaded.config, heads=heads)
    model = dataclasses.replace(loaded.model, config=config, params=params)
    decoder = Decoder(model, width=4)
    text = context.texts("held_out")[0]
    generation = context.contender("bpd", "held_out")[0].decode(
        GREEDY, [text.input_ids], context.options("held_out")
    )[0]
    slots, positions = padded_sizes([generation])
    record = record_text(decoder, generation, 4, slots=slots, positions=positions)
    whole = np.concatenate([text.input_ids, text.output_ids])[None, :-1]
    places = np.arange(whole.shape[1])[None]
    hidden, *_ = jax.jit(loaded.model.forward)(whole, places, Segments())
    logits = loaded.model.next_token_logits(hidden[0, len(text.input_ids) - 1 :])
    expected = entropy(jax.nn.log_softmax(logits[:, tokens]))
    np.testing.assert_allclose(record.entropies[:, 0], expected, rtol=1e-4)


def test_openfst_is_compared_with_the_exact_search(context):
    names = ["ngram:2", "ngram_fst:2"]
    drafts = [
        {record.example: record for record in next(draft_records(context, name, TASKS))}
        for name in names
    ]
    [records] = engine_records(context, "ngram_fst:2", TASKS)
    assert {record.contender for record in records} == {"ngram_fst:2"}
    for record in records:
        exact, other = (each[record.example].yields for each in drafts)
        same = from_digits(record.same)
        assert len(same) == len(exact)
        # Where the drafts are said to be the same, as many tokens are accepted.
        assert (exact == other)[same == 1].all()
        assert record.milliseconds > 0 < record.exact_milliseconds


@pytest.mark.parametrize("contender, noise", [("bpd", 0.0), ("ngram:2", 1.0)])
def test_records_of_sampled_texts_equal_those_of_sampling(context, contender, noise):
    settings = {"text_temperature": 0.7, "draft_noise": noise}
    config = dataclasses.replace(context.config, **settings)
    sampled = StudyContext(config, context.workdir)
    examples = sampled.examples("held_out")
    options = sampled.text_options("held_out", examples)
    assert (options.temperature, sampled.options("held_out").temperature) == (0.7, 0)
    # Random numbers are those of a place in the batch, which begins with the longest.
    examples = sorted(examples, key=lambda x: -len(x.input_ids))
    decoder, method = sampled.contender(contender, "held_out")
    generations = decoder.decode(method, [x.input_ids for x in examples], options)
    texts = sampled.texts("held_out")
    [records] = draft_records(sampled, contender, ["held_out"])
    assert {record.contender for record in records} == {contender}
    by_example = {record.example: record for record in records}
    for example, generation in zip(examples, generations, strict=True):
        text = texts[example.index].output_ids
        assert text.tolist() == generation.output_ids.tolist()
        record = by_example[example.index]
        assert (record.tokens, record.calls) == (len(text), generation.serial_calls)
    greedy = [text.output_ids.tolist() for text in context.texts("held_out")]
    assert greedy != [text.output_ids.tolist() for text in texts]
    other = sampled.text_options("other", examples)
    assert other.seed != options.seed
    with pytest.raises(UserError, match="leave --shard out"):
        StudyContext(config, context.workdir, Shard(1, 2))
    with pytest.raises(UserError, match="temperature must be 0"):
        dataclasses.replace(config, text_temperature=1e-9)
    with pytest.raises(UserError, match="draft_noise is for sampled texts"):
        dataclasses.replace(context.config, draft_noise=1.0)


def test_recorded_texts_are_reused(context, trained):
    first = [text.output_ids.tolist() for text in context.texts("held_out")]
    second = StudyContext(context.config, context.workdir)
    digest = context.digest("held_out", context.examples("held_out"))
    path = context.workdir / "texts" / f"held_out-{digest[:12]}.npz"
    before = path.stat().st_mtime_ns
    assert [text.output_ids.tolist() for text in second.texts("held_out")] == first
    # They are kept beside those of other settings.
    shorter = dataclasses.replace(context.config, max_new_tokens=2)
    texts = StudyContext(shorter, context.workdir).texts("held_out")
    assert all(len(text.output_ids) <= 2 for text in texts)
    assert path.stat().st_mtime_ns == before


def test_explorer_records_contain_every_call(context):
    """Calls are contiguous positions of the text, with the candidates of each."""
    config = dataclasses.replace(context.config, contenders=["bpd", "oracle"], shown=1)
    explored = StudyContext(config, context.workdir)
    (record, *_) = records = explorer_records(explored, "held_out")
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


def test_drafts_that_another_study_has_are_stored_once(context, tmp_path):
    """Table 4 has the reported texts, Table 8 needs those of tuning too."""
    here = StudyContext(context.config, tmp_path)
    [records] = draft_records(here, "bpd", TASKS, [REPORT])
    stored = []
    for study, known in (("table4", records), ("table8", [])):
        (tmp_path / study).mkdir()
        run_files.write_header(tmp_path / study, study, facts_of(here))
        run_files.append_records(tmp_path / study, known, "records.jsonl")
    run = run_files.open_run(tmp_path / "table8")
    measure(find_study("table8"), here, run, stored.extend)
    drafts = [(record.contender, record.part, record.example) for record in stored]
    assert drafts[:2] == [("bpd", "report", 1), ("bpd", "report", 2)]
    assert len(drafts) == len(set(drafts)) == 2 * 3


def test_in_domain_models_are_counted_from_texts_not_drawn(trained, tmp_path):
    """Four of ten dialogues are drawn; the n-grams are those of the other six."""
    dialogues = [(f"{n} times {n}?", f"is {n * n}.") for n in range(10)]
    records = [{"dialogue": text, "summary": answer} for text, answer in dialogues]
    write_json_lines(tmp_path / "samsum" / "test.jsonl", records)
    config = config_of(
        trained,
        data=str(tmp_path),
        tasks=["samsum"],
        contenders=["ngram:1@in_domain"],
        assets={"in_domain": {"ngram": f"{tmp_path}/in_domain/{{task}}"}},
        examples=3,
        longest_prompt=60,
        in_domain=100,
    )
    context = StudyContext(config, tmp_path)
    folder = tmp_path / "in_domain" / "samsum"
    facts = build_in_domain(StudyContext(config, tmp_path, Shard(1, 2)), "samsum")
    drawn = "".join(example.prompt for example in context.examples("samsum"))
    undrawn = [pair for pair in dialogues if pair[0] not in drawn]
    assert len(undrawn) == facts["texts"] == 6  # whatever the shard
    loaded = context.loaded("samsum")
    model = load_model(str(folder), vocab_size=loaded.vocab_size)
    counted = {
        pair
        for text, answer in undrawn
        for pair in itertools.pairwise(
            loaded.tokenizer.encode(
                f"Here is a dialogue: {text}\nWrite a short summary!\n{answer}"
            )
        )
    }
    assert counted <= {tuple(key) for key in model.ngrams(2).tolist()}
    assert context.depends_on_task("ngram:1@in_domain")
    decoder, _ = context.contender("ngram:1@in_domain", "samsum")
    assert decoder.assets.ngram.sizes == model.sizes
    before = (folder / "in_domain.json").stat().st_mtime_ns
    assert build_in_domain(context, "samsum") == facts
    assert (folder / "in_domain.json").stat().st_mtime_ns == before


def test_weights_are_tuned_per_task(context, tmp_path, trained):
    """Only on the tuning text, and for all contenders without an explicit weight."""
    config = dataclasses.replace(
        context.config,
        contenders=["bpd", "ngram:2", "ngram:1:alpha=1"],
        tuners={"ngram": "ngram:1", "neural": "neural:1"},
        alphas=(0, 1, 20),
    )
    assert config.same_texts({"settings": context.config.settings})
    tuned = StudyContext(config, tmp_path)
    untuned = tuned.made_with("ngram:2")
    tune(tuned)
    calls = {}
    for alpha in (0, 1, 20):
        (records,) = draft_records(tuned, f"ngram:1:alpha={alpha}", ["held_out"])
        calls[alpha] = sum(r.calls for r in records if r.part == "tune")
    best = min(calls, key=lambda alpha: (calls[alpha], abs(alpha - 1)))
    assert tuned.alphas == {"ngram": {"held_out": best}}  # there is no neural rescorer
    assert tuned.contender("ngram:2", "held_out")[1].setting("alpha") == best
    assert tuned.contender("ngram:1:alpha=1", "held_out")[1].setting("alpha") == 1
    assert tuned.contender("medusa:4", "held_out")[1].setting("alpha") is None
    assert tuned.made_with("ngram:2") != untuned
    assert facts_of(tuned)["alphas"] == tuned.alphas
    # Another study, or a shard of one, reads the tuned weights.
    (path,) = (tmp_path / "alphas").iterdir()
    written = json.loads(path.read_text())
    assert (written["examples"], written["alpha"]) == (1, best)
    path.write_text(json.dumps({**written, "alpha": 7}))
    for shard in (Shard(0, 1), Shard(1, 2)):
        reader = StudyContext(dataclasses.replace(config, examples=1), tmp_path, shard)
        tune(reader)
        assert reader.alphas == {"ngram": {"held_out": 7}}
    # Other candidate weights are tuned anew.
    retuned = StudyContext(dataclasses.replace(config, alphas=(1,)), tmp_path)
    tune(retuned)
    assert retuned.alphas == {"ngram": {"held_out": 1}}


def test_settings_are_tuned_for_each_search(context, tmp_path):
    """α of one draft and of many, temperature and positions; a greedy path has all."""
    grids = {"alpha": [0.5, 1, 20], "temperature": [1, 3], "heads": [2, 3]}
    contenders = ["bpd", "zero_gram:4:search=cover", "ngram:1", "ngram:2:alpha=1"]
    config = dataclasses.replace(
        context.config,
        contenders=[*contenders, "ngram:1:search=greedy", "oracle"],
        tuners={"ngram": "ngram:1"},
        grids=grids,
        pooled=True,
    )
    tuned = StudyContext(config, tmp_path)
    untuned = tuned.made_with("ngram:1")
    tune(tuned)
    assert tuned.alphas == {}  # A grid of weights replaces the tuners.
    settings = {name: set(by["held_out"]) for name, by in tuned.tuned.items()}
    assert settings == {
        "zero_gram:4:search=cover": {"temperature", "heads"},
        "ngram:1": {"alpha", "heads"},
        "ngram:2:alpha=1": {"heads"},
        "ngram:1:search=greedy": {"alpha"},
    }
    [cover] = [
        json.loads(path.read_text())
        for path in (tmp_path / "alphas").iterdir()
        if path.name.startswith("zero_gram_4_search_cover-all-")
    ]
    tried = {json.dumps(values): e for values, e in cover["block_efficiency"]}
    assert tried[json.dumps(cover["chosen"])] == max(tried.values())
    assert tuned.made_with("ngram:1") != untuned
    assert facts_of(tuned)["tuned"] == tuned.tuned
    _, method = tuned.contender("zero_gram:4:search=cover", "held_out")
    # Settings with the default's value are those of the method anyway.
    assert (method.source.heads, method.search.temperature) == tuple(
        cover["chosen"][name] for name in ("heads", "temperature")
    )


def test_second_turns_follow_the_models_answers(trained, tmp_path):
    records = [
        {"category": "math", "turns": [f"{n} times {n}?", "and then?"]}
        for n in range(3)
    ]
    write_json_lines(tmp_path / "spec_bench" / "test.jsonl", records)
    settings = {"tasks": ["math"], "turns": 2, "longest_prompt": 384}
    config = config_of(trained, data=str(tmp_path), **settings)
    context = StudyContext(config, tmp_path)
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}|{% endfor %}"
    chat_model = dataclasses.replace(context.loaded("math"), chat=Chat(template))
    context._models = {config.model: chat_model}
    examples = context.examples("math")
    assert [example.part for example in examples] == ["tune", "report", "report"] * 2
    decoder, _ = context.contender("greedy", "math")
    inputs = [example.input_ids for example in examples[:3]]
    answers = decoder.decode(GREEDY, inputs, context.options("math"))
    for first, second, answer in zip(examples[:3], examples[3:], answers, strict=True):
        text = plain_text(chat_model, answer.output_ids)
        assert text
        assert chat_model.tokenizer.decode(second.input_ids) == (
            f"user {first.prompt}|assistant {text}|user and then?|"
        )
    # Records without `turns`, of earlier versions, are of first turns.
    settings = {k: v for k, v in config.settings.items() if k != "turns"}
    assert config.differing(settings) == {"turns": 1}


def test_decode_lengths_per_task_are_limited_by_the_positions(trained, tmp_path):
    lengths = {"held_out": 9, "squad": 3}
    settings = {"examples": 1, "tune": 0, "longest_prompt": 100_000}
    config = config_of(trained, decode_lengths=lengths, **settings)
    context = StudyContext(config, tmp_path)
    model = context.loaded("held_out").config
    (example,) = context.examples("held_out")
    (text,) = context.texts("held_out")
    assert len(text.output_ids) == 9
    positions = model.trunk.max_length
    assert len(example.input_ids) <= positions - 9 - model.block_size
    long = dataclasses.replace(config, decode_lengths={"held_out": positions})
    with pytest.raises(UserError, match="no positions left for a prompt"):
        StudyContext(long, tmp_path / "long").examples("held_out")


def test_headers_of_other_texts_and_models_are_refused(context, trained, tmp_path):
    facts = facts_of(context)
    run_files.write_header(tmp_path, "table4", facts)
    assert check_header(tmp_path, context)["size"] == ""
    changes = {"texts": {"held_out": "other"}, "made_with": {"ngram:2": "other"}}
    for name, value in changes.items():
        run_files.write_header(tmp_path, "table4", {**facts, name: value})
        with pytest.raises(UserError, match="choose another --workdir, or remove"):
            check_header(tmp_path, context)
    # Plain BPD drafts with the decoded model only.
    assert context.made_with("bpd") == context.made_with("medusa:4")
    assert context.made_with("ngram:2") == context.made_with("medusa_ngram:4")
    assert len({context.made_with(name) for name in ("bpd", "ngram:2")}) == 2
    copied = tmp_path / "copy"
    shutil.copytree(trained / "run" / "ngram", copied)
    assert content_digest(copied) == content_digest(trained / "run" / "ngram")
    # Only the beginning and the end of large files are read.
    for path in (next(copied.glob("log_probs_1.npy")), copied / "large"):
        path.write_bytes(path.read_bytes() if path.exists() else bytes(5 << 20))
        before = content_digest(copied)
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert content_digest(copied) != before
