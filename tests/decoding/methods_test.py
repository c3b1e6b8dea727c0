import importlib.metadata
import sys

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.base.settings import fields_of
from bpd_jax.decoding.aliases import ALIASES, ngram
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.method_text import describe_methods, parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import SPECULATIVE, DecodeOptions
from bpd_jax.decoding.replay import record
from bpd_jax.drafting import parts as registry
from bpd_jax.drafting.assets import Assets
from bpd_jax.drafting.parts import parts
from bpd_jax.drafting.refiners.markov import Markov
from bpd_jax.drafting.refiners.ngram import NGram
from bpd_jax.drafting.searches.beam_search import Greedy
from bpd_jax.drafting.searches.best import Best
from bpd_jax.drafting.searches.tree import Tree
from bpd_jax.drafting.sources.heads import Heads
from bpd_jax.drafting.sources.lookup import Lookup
from tests.decoding.random_models import (
    make_model,
    make_ngram,
    make_prompts,
    make_refiner,
)


@pytest.mark.parametrize(
    "text, composed, label",
    [
        ("greedy", "none", "Greedy"),
        ("bpd:heads=2", "heads:2/greedy", "BPD (heads 2)"),
        ("ngram:9:search=best", "heads+ngram/tree:9", "Tree of 9, 3-gram"),
        (
            "neural_ngram:2:alpha=0.7:beta=0.3",
            "heads+ngram:alpha=0.3+neural:alpha=0.7/best:2",
            "2-best neural + 3-gram (ngram alpha 0.3, alpha 0.7)",
        ),
        ("medusa_neural:8", "heads+neural/static:8", "Medusa tree of 8, neural"),
        ("prompt_lookup:4:match=2", "lookup:4:match=2", "Prompt lookup of 4 (match 2)"),
        ("draft_model:3:drafts=2", "draft_model:3/chains:2", "Draft model, 3 tokens"),
    ],
)
def test_aliases(text, composed, label):
    method = parse_method(text)
    assert method.name == text
    assert method.composed == composed
    assert method == parse_method(composed)
    assert parse_method(composed).name == composed
    assert method.label(3).startswith(label)


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_is_a_function_that_returns_a_method(name):
    method = ALIASES[name]()
    assert method == parse_method(name) == parse_method(method.composed)
    assert parse_method(name).name == name
    assert method.name == method.composed


def test_methods_are_objects():
    method = Method(
        Heads(k=8), [Markov(), NGram(alpha=0.25)], Tree(32), Lookup(8, match=2)
    )
    text = "heads:k=8+markov+ngram:alpha=0.25/tree:32+lookup:8:match=2"
    assert method.name == text
    assert parse_method(text) == method
    assert parse_method(method) is method
    assert ngram(16, k=8, alpha=0.5) == Method(Heads(k=8), [NGram(alpha=0.5)], Best(16))
    assert Method(Heads()).search == Greedy()
    with pytest.raises(UserError, match="'block' is not the source"):
        Method("block")
    with pytest.raises(UserError, match=r"Tree\(.*\) is not a refiner"):
        Method(Heads(), [Tree(8)])
    with pytest.raises(UserError, match=r"NGram\(.*\) is not a search"):
        Method(Heads(), [], NGram())
    with pytest.raises(UserError, match=r"Tree\(.*\) is not lookup"):
        Method(Heads(), [], Tree(8), Tree(3))
    assert Method(Heads(), NGram(), Best(2)) == Method(Heads(), [NGram()], Best(2))
    with pytest.raises(UserError, match="refiner can be used once"):
        Method(Heads(), [NGram(), NGram(alpha=2.0)])


def test_settings_of_compositions_are_changed_as_those_of_aliases():
    for text in ("heads+ngram+neural/best:2", "neural_ngram:2"):
        method = parse_method(text).with_setting("alpha", 0.5)
        assert method.name == "heads+ngram+neural:alpha=0.5/best:2"
    engine = parse_method("heads+ngram/best:2").with_setting("engine", "fst")
    assert engine.name == "heads+ngram/best:2:engine=fst"
    lookup = parse_method("block/tree:8+lookup:8").with_setting("match", 2)
    assert lookup.name == "block/tree:8+lookup:8:match=2"


@pytest.mark.parametrize(
    "value", ["99999999999999999999", "0.12345678", "1e-9", "1000000.0", "2.0"]
)
def test_numbers_survive_in_the_text_of_a_method(value):
    method = parse_method(f"neural_ngram:beta={value}")
    again = parse_method(method.composed)
    assert again == method
    assert float(value) in [part.alpha for part in again.refiners]


def test_parts_compose():
    method = parse_method("heads+markov+ngram:alpha=0.5/tree:32+lookup:8")
    assert (method.count, method.counts) == (32, "nodes")
    assert method.needs == {"markov", "ngram"}
    assert method.label(4) == (
        "Tree of 32, Markov head + 4-gram (alpha 0.5), with prompt lookup of 8"
    )
    assert method.without("alpha").composed == "heads+markov+ngram/tree:32+lookup:8"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "unknown method"),
        ("medusa_ngrams", "did you mean medusa_ngram"),
        ("heads+ngarm/best:4", "no refiner 'ngarm'.*did you mean ngram"),
        ("ngram:0", "1 to 1024"),
        ("bpd:4", "takes no number"),
        ("ngram:4:p=3", "do not have the setting p"),
        ("ngram:4:k", "'k' is not a setting"),
        ("ngram:4:k=3:k=4", "each once"),
        ("ngram:4:alpha=nan", "alpha must be a finite number"),
        ("ngram:4:search=greedy", "one path"),
        ("medusa:8:search=beam", "static or best"),
        ("heads+ngram+ngram/best:2", "once only"),
        ("heads+lookup:4/best:4", "after the search"),
        ("heads/best:4+lookahead:3", "only one lookup"),
        ("lookup:4/best:4", "complete method"),
        ("ngram/best:4", "source 'ngram'; ngram is a refiner, as in heads"),
        ("tree:4", "tree is a search, as in heads.ngram/tree"),
        ("heads+block/tree:4", "no refiner 'block'; block is a source"),
        ("eagle/tree:8:price=1.5", "eagle must read the tokens of every call"),
        ("heads+neural/tree:8:price=1.5", "neural must read the tokens"),
        ("neural:2:search=exact", "an exact search needs refiners with finitely"),
        ("heads/best:k=2", "'k' is not a setting of best, which takes paths"),
        ("heads/best:" + "9" * 5000, "at most 1000 characters, not 5011"),
        (16, "must be a name such as ngram:16, not 16"),
        ("eagle+ngram/tree:16", "ngram needs a lattice source, but .* of eagle"),
        ("eagle/oracle", "the oracle needs a lattice source"),
    ],
)
def test_unknown_methods_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_method(text)


PLUGIN = """
import dataclasses

from bpd_jax.drafting.parts import register
from bpd_jax.drafting.searches.tree import Tree


@register
@dataclasses.dataclass(frozen=True)
class Bush(Tree):
    name = "bush"
"""


def test_installed_packages_add_parts(tmp_path, monkeypatch):
    (tmp_path / "bushes.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    installed = importlib.metadata.EntryPoint("bush", "bushes", registry.ENTRY_POINTS)
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [installed] if group == installed.group else [],
    )
    monkeypatch.setattr(registry, "_PARTS", dict(registry._PARTS))
    registry._import_parts.cache_clear()
    assert parse_method("heads+ngram/bush:4").search_name == "bush"
    (tmp_path / "bushes.py").write_text("import no_such_module")
    sys.modules.pop("bushes")
    registry._PARTS.pop("bush")
    registry._import_parts.cache_clear()
    assert parse_method("heads/tree:4").search_name == "tree"
    with pytest.raises(UserError, match=r"entry point bush = bushes.*no_such_module"):
        parse_method("heads/bush:4")
    monkeypatch.undo()
    registry._import_parts()


def test_the_table_names_the_modules_of_parts():
    for name, part in parts().items():
        assert part.__module__.endswith(f".{registry._MODULES.get(name, name)}")


def test_help_names_every_part_setting_and_alias():
    text = describe_methods()
    for name, part in parts().items():
        assert f"\n  {name}" in text
        assert part.help in text
        assert part.reference in text
        for field in fields_of(part).values():
            assert field.metadata["help"] in text
    assert (
        "\n      nodes         nodes M, the certain token included (the number); "
        in text
    )
    assert "draft tokens (the number); default 5\n" in text
    for name in ALIASES:
        assert f"\n  {name}" in text


@pytest.mark.parametrize(
    "name, message",
    [
        ("ngram:2", "needs an n-gram model: build one with"),
        ("neural", "needs a small language model"),
        ("markov", "needs a trained Markov refiner: train one with"),
        ("zero_gram:65", "asks for 65 drafts, but the lattice of 4 heads and 4"),
        ("zero_gram:4:k=14", "asks for 14 candidates, but there are only 13"),
        ("bpd:heads=5", "asks for 5 heads: give 2 to 4"),
        ("auto", "auto is not a method by itself"),
        ("heads+ngram/oracle", "refiners change nothing"),
        ("lookahead:200", "verifies 1200 tokens in every serial call"),
        ("draft_model:4:k=2:drafts=3", "different first tokens"),
        ("draft_model:600:drafts=2", "more than 1024"),
        ("draft_model:4:k=14", "13 tokens"),
        ("block/greedy", "needs a block drafter"),
    ],
)
def test_methods_that_do_not_fit_are_refused(name, message):
    assets = Assets(draft_model=make_model(5, block_size=1, num_layers=1))
    decoder = Decoder(make_model(0), width=4, assets=assets)
    with pytest.raises(UserError, match=message):
        decoder.drafter(parse_method(name))


def test_a_tree_counts_nodes_where_there_are_few_paths():
    decoder = Decoder(make_model(0), width=4)
    assert decoder.drafter(parse_method("zero_gram:2:k=1:search=best")).max_nodes == 2
    with pytest.raises(UserError, match="asks for 2 drafts, but the lattice"):
        decoder.drafter(parse_method("zero_gram:2:k=1"))


def test_drawn_drafts_cannot_be_combined_with_lookup():
    decoder = Decoder(make_model(0), width=4)
    speculative = DecodeOptions(temperature=1.0, acceptance="speculative")
    with pytest.raises(UserError, match="cannot be combined with lookup"):
        decoder.drafter(parse_method("medusa:8:lookup=4"), speculative)
    # Deterministic drafts can.
    decoder.drafter(parse_method("zero_gram:2:lookup=4"), speculative)


def test_assets_must_fit_the_model():
    model = make_model(0)
    with pytest.raises(UserError, match="lattice_width must be"):
        Decoder(model, width=14)
    with pytest.raises(UserError, match="alpha must be"):
        Decoder(model, width=4, alpha=float("nan"))
    with pytest.raises(UserError, match="has 15 tokens and the language model 13"):
        Decoder(model, width=4, assets=Assets(ngram=make_ngram(15)))
    small = make_model(0, vocab_size=15)
    for name in ("rescorer", "draft_model"):
        with pytest.raises(UserError, match="has 15 tokens and the language model 13"):
            Decoder(model, width=4, assets=Assets(**{name: small}))
    plain = make_model(0, block_size=1)
    with pytest.raises(UserError, match="no block heads"):
        Decoder(plain, width=4).drafter(parse_method("bpd"))
    with pytest.raises(UserError, match="5 heads"):
        Decoder(model, width=4, assets=Assets(markov=make_refiner(heads=5)))


PROMPTS = make_prompts([5, 1, 30])


@pytest.mark.parametrize("name", ["neural", "draft_model"])
def test_texts_longer_than_the_small_model_reads_are_refused(name):
    small = make_model(5, block_size=1, num_layers=1, max_length=40)
    assets = Assets(rescorer=small, draft_model=small)
    decoder = Decoder(make_model(0), width=4, assets=assets)
    options = DecodeOptions(max_new_tokens=15)
    message = "prompt 3 has 30 tokens, but the small model holds 40"
    for run in (decoder.check, decoder.decode):
        with pytest.raises(UserError, match=message):
            run(parse_method(name), PROMPTS, options)
    with pytest.raises(UserError, match="prompt 1 has 30 tokens"):
        decoder.stream(parse_method(name), PROMPTS[2], options)


def test_the_lattice_is_no_wider_than_the_draft_vocabulary():
    # The vocabulary has 13 tokens, so that a decoder may have a width of 8.
    model = make_model(draft_vocabulary=7)
    assets = Assets(ngram=make_ngram(), markov=make_refiner())
    decoder = Decoder(model, width=8, assets=assets)
    for name in ("zero_gram:2", "medusa:4", "ngram_device:2", "markov:3", "oracle"):
        with pytest.raises(UserError, match=r"lattice_width = 8 .* only 7 tokens"):
            decoder.drafter(parse_method(name))
        decoder.drafter(parse_method(f"{name}:k=7"))
    for name in ("greedy", "bpd", "prompt_lookup:3"):
        decoder.drafter(parse_method(name))
    options = DecodeOptions(max_new_tokens=4)
    texts = decoder.decode(parse_method("greedy"), make_prompts([5]), options)
    assert record(decoder, texts, options, width=10).model.width == 7


@pytest.mark.parametrize("acceptance", ["exact", SPECULATIVE])
def test_draft_model_equal_to_the_model_is_always_accepted(acceptance):
    model = make_model(0, block_size=1, num_layers=1)
    decoder = Decoder(model, width=4, assets=Assets(draft_model=model))
    temperature = 0.0 if acceptance == "exact" else 0.8
    options = DecodeOptions(
        max_new_tokens=20, temperature=temperature, acceptance=acceptance
    )
    # All tokens are candidates, so that its distributions equal the model's.
    method = parse_method("draft_model:4:k=13")
    for generation in decoder.decode(method, PROMPTS, options):
        assert generation.accepted.tolist() == [5] * 4
        assert generation.block_efficiency == 5


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"end_of_text": "</s>"}, "end_of_text must be"),
        ({"acceptance": "speculative"}, "give a temperature above 0"),
        ({"stop": "end"}, "stop must be"),
        ({"temperature": 1e-300}, "temperature must be 0"),
        ({"stop": ("a", "\udcff")}, "stop must be UTF-8"),
        ({"acceptance": "typical", "temperature": 1, "stride": 1}, "with stride"),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DecodeOptions(**fields)
