"""The Python interface: texts in, texts out."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpd_jax import api
from bpd_jax.base.errors import UserError
from bpd_jax.base.reading import SMALLEST_VOCABULARY
from bpd_jax.data.tokenizer import train_bpe
from bpd_jax.decoding import run_loading
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.models.mesh import MeshConfig

PROMPTS = ["3 times 4 is", "7", "2 times"]


@pytest.fixture(scope="module")
def lm(trained):
    return api.load(str(trained / "run"))


@pytest.fixture(scope="module")
def bytes_lm():
    """A language model that has only a tokenizer, whose tokens are bytes."""
    tokenizer = train_bpe(["a"], SMALLEST_VOCABULARY)
    return types.SimpleNamespace(tokenizer=tokenizer)


def test_methods_give_the_same_completions(lm):
    plain = api.generate(lm, PROMPTS, "greedy", max_new_tokens=24, batch_size=3)
    drafted = api.generate(lm, PROMPTS, "medusa:8", max_new_tokens=24, batch_size=3)
    assert [c.text for c in drafted] == [c.text for c in plain]
    assert [c.block_efficiency for c in plain] == [1.0] * 3
    for completion in drafted:
        generation = completion.generation
        assert completion.method == parse_method("medusa:8")
        tokens, calls = len(generation.output_ids), generation.serial_calls
        assert completion.block_efficiency == tokens / calls
        ids = [t for t in generation.output_ids if t != lm.tokenizer.end_of_text]
        assert completion.text == lm.tokenizer.decode(ids)
    assert any(c.block_efficiency > 1 for c in drafted)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"precision": "int4"}, "precision is one of float32, .*, int8, not 'int4'"),
        ({"precision": "int8", "mesh": MeshConfig()}, "precision=int8 is for one dev"),
        ({"precision": "int8"}, "in blocks of 32 numbers, but d_model .* has 16 feat"),
    ],
)
def test_precisions_are_refused_before_weights_are_read(
    trained, options, message, monkeypatch
):
    monkeypatch.delattr(run_loading, "load_run_parameters")
    with pytest.raises(UserError, match=message):
        api.load(str(trained / "run"), **options)


def test_a_prompt_may_be_token_ids(lm):
    ids = lm.encode(PROMPTS[0])
    assert ids[0] == lm.tokenizer.end_of_text
    texts = {
        api.generate(lm, [prompt], "medusa:8", max_new_tokens=24)[0].text
        for prompt in (PROMPTS[0], ids, ids.tolist(), tuple(ids.tolist()))
    }
    assert len(texts) == 1


def test_completion_ends_before_the_stop_text(lm):
    def complete(**options):
        [completion] = api.generate(
            lm, PROMPTS[:1], "medusa:8", max_new_tokens=24, **options
        )
        return completion

    whole = complete()
    stop = whole.text[4:6]
    one, two = complete(stop=stop), complete(stop=["#", stop])
    assert one.text == two.text == whole.text[: whole.text.index(stop)]
    # Decoding ended there too.
    assert len(one.generation.output_ids) < len(whole.generation.output_ids)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.9, "seed": 3}, {"stop": ("is.\n times", "####")}]
)
def test_streamed_pieces_join_to_the_completion(lm, options):
    [completion] = api.generate(
        lm, PROMPTS[:1], "medusa:8", max_new_tokens=24, **options
    )
    pieces = list(api.stream(lm, PROMPTS[0], "medusa:8", max_new_tokens=24, **options))
    assert "".join(pieces) == completion.text
    assert len(pieces) > 1


def test_each_asset_comes_from_the_run_folder_or_from_its_argument(lm, trained):
    assert lm.assets.ngram.order == 3
    plain = api.load(str(trained / "plain"), ngram=str(trained / "run" / "ngram"))
    assert plain.assets.ngram.sizes == lm.assets.ngram.sizes
    assert api.load(str(trained / "plain")).assets.ngram is None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokens": 8}, r"unknown option 'tokens': choose from \['temperature'"),
        ({"method": "neural"}, "needs a small language model"),
        ({"method": 3}, "method must be a name"),
        ({"max_new_tokens": 95}, "prompt 1 has .* tokens, but the model holds 96"),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_invalid_options_are_refused_immediately(lm, options, message, batched):
    # `stream` raises before its first piece is requested.
    run, prompts = (api.generate, PROMPTS) if batched else (api.stream, PROMPTS[0])
    with pytest.raises(UserError, match=message):
        run(lm, prompts, **options)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "prompt 1 is empty"),
        ([1, 270], r"token ids outside 0 … 269: encode it"),
        ([1, 2**70], "not a list of token ids"),
        ([[1], [2, 3]], "not a list of token ids"),
        ([1.5], "not a list of token ids"),
    ],
)
def test_invalid_prompts_are_refused(lm, prompt, message):
    with pytest.raises(UserError, match=message):
        api.generate(lm, [prompt])
    with pytest.raises(UserError, match=message):
        api.stream(lm, prompt)


def test_misplaced_arguments_are_refused(lm, trained):
    with pytest.raises(UserError, match="must be a list of texts, not the text 'hi'"):
        api.generate(lm, "hi")
    with pytest.raises(UserError, match="template has no effect on a prompt of token"):
        api.stream(lm, [1, 2], template={"x": 1})
    with pytest.raises(UserError, match=r"must be a mapping such as .*, not 'x=1'"):
        api.generate(lm, PROMPTS, template="x=1")
    with pytest.raises(UserError, match="unknown asset 'ngrams': choose from ngram"):
        api.load(str(trained / "run"), ngrams="x")


def pieces_of(bytes_lm, text, cuts, stop=()):
    """The visible pieces of a text that is decoded in parts split at byte `cuts`."""
    tokens = np.array(bytes_lm.tokenizer.encode(text))
    parts = np.split(tokens, sorted(cut for cut in cuts if cut < len(tokens)))
    last = object()
    stream = [(part, None) for part in parts[:-1]] + [(parts[-1], last)]
    options = DecodeOptions(stop=stop, end_of_text=bytes_lm.tokenizer.end_of_text)
    shown = list(api.visible_pieces(bytes_lm, iter(stream), options))
    assert [generation for _, generation in shown if generation is not None] == [last]
    return [piece for piece, _ in shown]


def test_accepted_draft_tokens_are_marked(bytes_lm):
    ids = np.array(bytes_lm.tokenizer.encode("abcdé"))
    calls = iter([(ids[:3], None), (ids[3:4], None), (ids[4:], "last")])
    options = DecodeOptions(end_of_text=bytes_lm.tokenizer.end_of_text)
    pieces = list(api.marked_pieces(bytes_lm, calls, options))
    # The last call decodes both bytes of é, which form one character.
    marked = [("a", False), ("bc", True), ("d", False), ("é", True)]
    assert [piece[:2] for piece in pieces if piece[0]] == marked
    assert pieces[-1][-1] == "last"


def test_incomplete_utf8_characters_are_held_back(bytes_lm):
    """é has two bytes, 漢 three and 🙂 four."""
    assert pieces_of(bytes_lm, "aé漢🙂", [2, 4, 7]) == ["a", "é", "漢", "🙂"]


def test_partial_stop_texts_are_held_back(bytes_lm):
    # The longest stop text has three characters, so two are held back.
    assert pieces_of(bytes_lm, "one\n\n#", [3, 4, 5], ("\n\n#",)) == ["o", "n", "e", ""]
    assert pieces_of(bytes_lm, "one\n\nx", [4, 5], ("\n\n#",)) == ["on", "e", "\n\nx"]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.text("ab\né漢🙂\N{REPLACEMENT CHARACTER}", min_size=1, max_size=12),
    st.lists(st.integers(1, 30), max_size=8, unique=True),
    st.lists(st.text("ab\né", min_size=1, max_size=3), max_size=2),
)
def test_pieces_join_to_the_text_before_its_first_stop_text(
    bytes_lm, text, cuts, stops
):
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    decoded = text[: min(ends)] if ends else text
    pieces = pieces_of(bytes_lm, decoded, cuts, tuple(stops))
    tokens = bytes_lm.tokenizer.encode(decoded)
    options = DecodeOptions(stop=tuple(stops))
    assert "".join(pieces) == api.visible_text(bytes_lm, tokens, options)
    if not ends:
        assert "".join(pieces) == text
