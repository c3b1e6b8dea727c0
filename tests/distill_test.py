"""`bpd_jax.distill`, which generates texts with a model: shards, resuming, errors."""

import json
import pathlib
import shutil

import pytest

from bpd_jax.data.generations import open_generations, read_header, shard_paths
from bpd_jax.data.tokenizer import Tokenizer
from bpd_jax.decoding.loading import load_model
from bpd_jax.models.attachments import fingerprint
from tests.commands import Done, assert_all_refused, succeed

GOLDEN = pathlib.Path(__file__).parent / "formats" / "golden" / "llama"


def distill(folder: pathlib.Path, *arguments: str) -> Done:
    """Runs the command in a folder, where it succeeds."""
    return succeed("bpd_jax.distill", *arguments, folder=folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a tiny model, prompts and generated texts, and the arguments."""
    folder = tmp_path_factory.mktemp("distill")
    shutil.copytree(GOLDEN, folder / "tiny")
    prompts = ["a b", "c", "b a c a", "c c c", "a"]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    arguments = [
        "--model=tiny",
        "--prompts_file=prompts.jsonl",
        "--nochat",
        "--max_new_tokens=6",
        "--batch_size=2",
        "--output=texts",
    ]
    assert "5 texts: texts" in distill(folder, *arguments).stdout
    return folder, arguments


def test_texts_begin_with_their_prompts(written):
    folder, _ = written
    texts = open_generations(folder / "texts")
    loaded = load_model(str(folder / "tiny"))
    assert texts.base == fingerprint(loaded.config, loaded.params)
    assert texts.vocab_size == loaded.vocab_size
    assert Tokenizer.load(folder / "texts").to_json() == loaded.tokenizer.to_json()
    beginnings = sorted(
        texts[row][:length].tolist() for row, length in enumerate(texts.prompt_lengths)
    )
    plain = loaded.without_chat()
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert beginnings == sorted(plain.encode_prompt(text).tolist() for text in prompts)
    assert (texts.lengths - texts.prompt_lengths >= 1).all()
    assert (texts.lengths - texts.prompt_lengths <= 6).all()


def test_texts_do_not_depend_on_the_batch_size_and_are_not_made_again(written):
    """`decoding/distillation_test` stops and resumes runs."""
    folder, arguments = written

    def texts(name):
        generations = open_generations(folder / name)
        rows = range(len(generations))
        return sorted((int(generations.indices[i]), *generations[i]) for i in rows)

    distill(folder, *arguments, "--output=again", "--batch_size=3")
    assert texts("again") == texts("texts")
    gin = "--gin.DecodeOptions.end_of_text=3"
    result = distill(folder, *arguments, "--output=other", "--answered=texts", gin)
    assert "5 prompts are answered in other folders" in result.stdout
    assert not shard_paths(folder / "other")
    assert read_header(folder / "other")["facts"]["options"]["end_of_text"] == 3


def test_incompatible_settings_are_refused(written):
    folder, arguments = written
    cases = [
        (["--max_new_tokens=7"], "texts made with options = "),
        (["--made_up_prompts=3"], "has no chat template"),
        (["--output=short", "--longest_prompt=1"], "no prompt has 1 tokens or fewer"),
        (["--output=long", "--max_new_tokens=62"], "holds 64 and max_new_tokens is 62"),
        (["--prompts_file=prompts.jsonl"], "other prompts than those of"),
        (["--temperature=1", "--acceptance=typical"], "typical acceptance"),
        (["--output=short", "--answered=txets"], "txets"),
        (["--output=short", "--feature_layers=0"], "--feature_layers needs --states"),
        (["--output=short", "--states=s", "--feature_layers=9"], "layers [9] must be"),
        (["--output=short", "--states=short"], "must be different folders"),
        (["--output=short", "--states=gs://b/s"], "choose a folder on a local disk"),
    ]
    cases = [([*arguments, *changed], message) for changed, message in cases]
    cases += [(["--model=tiny", "--output=short"], "there are no prompts")]
    assert_all_refused("bpd_jax.distill", cases, folder)
    # No folder is left that would make the corrected command fail.
    assert not any((folder / name).exists() for name in ("short", "long"))


def test_prompts_files_are_compared_by_content(written):
    folder, arguments = written
    lines = (folder / "prompts.jsonl").read_text()
    (folder / "renamed.jsonl").write_text(lines)
    renamed_arguments = [
        word.replace("prompts.jsonl", "renamed.jsonl") for word in arguments
    ]
    result = distill(folder, *renamed_arguments)
    assert "5 of 5 texts exist already." in result.stdout
    (folder / "renamed.jsonl").write_text(lines.replace("c c c", "w5 c c"))
    message = "other prompts than those of ['renamed.jsonl']"
    assert_all_refused("bpd_jax.distill", [(renamed_arguments, message)], folder)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder with a tiny model that has a chat template, and arguments for it."""
    folder = tmp_path_factory.mktemp("talking")
    shutil.copytree(GOLDEN, folder / "tiny")
    path = folder / "tiny" / "tokenizer_config.json"
    template = "w7 w8 {% for turn in messages %}{{ turn.content }} w9 {% endfor %}w10"
    config = {**json.loads(path.read_text()), "chat_template": template}
    path.write_text(json.dumps(config))
    arguments = [
        "--model=tiny",
        "--made_up_prompts=3",
        "--made_up_tokens=30",
        "--max_new_tokens=6",
        "--batch_size=8",
        "--output=texts",
    ]
    return folder, arguments


def test_generated_prompts_are_stored_and_validated(chat_model):
    folder, arguments = chat_model
    distill(folder, *arguments)
    path = folder / "texts" / "prompts.json"
    made_up = json.loads(path.read_text())
    assert len(open_generations(folder / "texts")) == len(set(made_up)) == 3
    for damaged in ('["w3 w4', json.dumps([*made_up[:2], 3])):
        path.write_text(damaged)
        cases = [(arguments, "prompts.json")]
        assert_all_refused("bpd_jax.distill", cases, folder)
