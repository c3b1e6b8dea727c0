import json

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from bpd_jax.base.errors import UserError
from bpd_jax.formats.gguf_file import GGUFFile
from bpd_jax.formats.gguf_tokenizer import read_tokenizer

HARD = [
    "",
    " ",
    "  a   b\t\t\n\n\n  x ",
    "1234567 ½ ²³ ٣٤ x1y22 3.14159 1,000,000",
    "🙂👩‍👩‍👧‍👦 é e\u0301 日本語 한국 Ελληνικά",
    "a\r\nb\r\n\r\n c\r",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}\n\n\n",
    "\u00a0\u2003x\x00\x07",
    "I'll, I'LL, don't, DON'T; he'd he’d",
    "the end of the theme, then the anthem; the end.   the the",
]
TEXTS = [*HARD, "The theme of the anthem is the end of the thing they think of."] * 3
PRE = ["default", "gpt-2", "llama-bpe", "qwen2", "gpt-4o"]


@pytest.fixture(scope="module")
def build(tiny, tmp_path_factory):
    def built(values, vocab_size=5000):
        path = tmp_path_factory.mktemp("tokenizer") / "m.gguf"
        file = GGUFFile(tiny.make("llama").write(path, values))
        return read_tokenizer(file, vocab_size)

    return built


@pytest.fixture(scope="module")
def trained():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=alphabet,
            special_tokens=["<|end|>", "<|user|>", "<tool>"],
            show_progress=False,
        ),
    )
    return tokenizer


@pytest.fixture(scope="module")
def byte_level(build, trained):
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    kind = gguf.TokenType
    kinds = [kind.CONTROL, kind.CONTROL, kind.USER_DEFINED]
    kinds += [kind.NORMAL] * (len(tokens) - 3)
    merges = [*map(" ".join, json.loads(trained.to_str())["model"]["merges"])]

    def named(pre, **values):
        fields = {"pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges}
        fields |= values
        return build({f"tokenizer.ggml.{key}": value for key, value in fields.items()})

    named.tokens = tokens
    return named


def test_gpt2_and_smollm_split_text_as_published(trained, byte_level):
    """The same vocabulary with the pre-tokenizers that Hugging Face publishes."""
    byte_split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    for pre, steps in (("gpt-2", [byte_split]), ("smollm", [digits, byte_split])):
        published = tokenizers.Tokenizer.from_str(trained.to_str())
        published.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer = byte_level(pre).tokenizer
        for text in HARD:
            assert tokenizer.encode(text).ids == published.encode(text).ids


@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("llama-bpe", "I'LL pay  1234€!\n\n x", "I|'LL|·pay|·|·|123|4|€!\n\n|·x"),
        ("qwen2", "I'LL pay  1234€!\n\n x", "I|'LL|·pay|·|·|1|2|3|4|€!\n\n|·x"),
        ("dbrx", "I'LL pay  1234€!\n\n x", "I|'LL|·pay|·|·|123|4|€!\n\n|·x"),
        ("smaug-bpe", "I'LL 1234€!/\n", "I|'LL|·|123|4|€!/\n"),
        ("gpt-4o", "I'LL payNow 1234€!/\n ЯдА", "I'LL|·pay|Now|·|123|4|€!/\n|·Яд|А"),
        ("tekken", "I'LL payNow 1234€!/\n", "I|'LL|·pay|Now|·|1|2|3|4|€!/\n"),
        ("default", "I'LL pay  12345€!\n\n x", "I|'|LL|·pay|·|·|123|45|€|!|\n\n|·x"),
    ],
)
def test_each_pre_tokenizer_splits_differently(byte_level, pre, text, expected):
    pre_tokenizer = byte_level(pre).tokenizer.pre_tokenizer
    spans = [span for _, span in pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b].replace(" ", "·") for a, b in spans] == expected.split("|")


@pytest.mark.parametrize("pre", PRE)
def test_text_round_trips(byte_level, pre):
    tokenizer = byte_level(pre).tokenizer

    @settings(derandomize=True, deadline=None, max_examples=60)
    @given(st.one_of(st.sampled_from(HARD), st.text(max_size=60)))
    def check_round_trip(text):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    check_round_trip()


def test_special_tokens_are_not_split(byte_level):
    embedded = byte_level("smollm")
    text = "<|user|>the <tool> end<|end|>"
    ids = embedded.tokenizer.encode(text).ids
    assert (ids[0], ids[-1]) == (1, 0)
    assert 2 in ids
    assert embedded.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "<tool>" in embedded.tokenizer.decode(ids)
    assert "<|end|>" not in embedded.tokenizer.decode(ids)


def test_begin_and_end_tokens_are_read(byte_level):
    embedded = byte_level("smollm", eos_token_id=5, eot_token_id=6, bos_token_id=1)
    assert embedded.begin_of_text is None
    # <|end|> is recognised by its name.
    assert embedded.end_tokens == (5, 6, 0)
    assert byte_level("smollm", add_bos_token=True).begin_of_text == 1
    assert byte_level("llama-bpe", add_bos_token=False).begin_of_text is None


def test_some_pre_tokenizers_begin_texts_and_need_no_merges_for_tokens(byte_level):
    lengths = {"llama-bpe": 1, "tekken": 1, "smollm": 2, "smaug-bpe": 2, "gpt-4o": 2}
    for pre, length in lengths.items():
        embedded = byte_level(pre, merges=["h e"], bos_token_id=1)
        assert len(embedded.tokenizer.encode("the").ids) == length
        assert embedded.begin_of_text == (1 if length == 1 else None)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A SentencePiece BPE with byte fallback, trained with Llama's settings."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "m"),
        model_type="bpe",
        vocab_size=420,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


@pytest.fixture(scope="module")
def sentencepiece_values(sentencepiece_model):
    kind, model = gguf.TokenType, sentencepiece_model
    ids = range(model.get_piece_size())
    kinds = [kind.BYTE if model.is_byte(id) else kind.NORMAL for id in ids]
    kinds[:3] = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(id) for id in ids],
        "tokenizer.ggml.scores": [model.get_score(id) for id in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_sentencepiece_ids_are_reproduced(
    build, sentencepiece_model, sentencepiece_values
):
    embedded = build(sentencepiece_values)
    assert (embedded.begin_of_text, embedded.end_tokens) == (1, (2,))
    for text in (text for text in HARD if "\x00" not in text):
        ids = embedded.tokenizer.encode(text).ids
        assert ids == sentencepiece_model.encode(text)
        assert embedded.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_space_prefix_can_be_disabled(build, sentencepiece_values):
    values = {**sentencepiece_values, "tokenizer.ggml.add_space_prefix": False}
    tokenizer = build(values).tokenizer
    for text in HARD:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    with_space = build(sentencepiece_values).tokenizer
    assert with_space.encode("the").ids != tokenizer.encode("the").ids
    assert with_space.encode("the").ids == tokenizer.encode(" the").ids


def test_special_ids_that_a_sentencepiece_file_lacks(build, sentencepiece_values):
    absent = [key for key in sentencepiece_values if key.endswith("_token_id")]
    embedded = build({**sentencepiece_values, **dict.fromkeys(absent)})
    assert (embedded.begin_of_text, embedded.end_tokens) == (1, (2,))
    assert embedded.begin_text == "<s>"
    assert embedded.tokenizer.model.unk_token == "<unk>"


@pytest.mark.parametrize("name", ["Phi3", "Phi"])
def test_special_tokens_of_phi_3_remove_blanks(build, sentencepiece_values, name):
    tokenizer = build({**sentencepiece_values, "general.name": name}).tokenizer
    with_blanks, without = (
        tokenizer.encode(f"</s>{blanks}the").ids for blanks in ("\n ", "")
    )
    assert (with_blanks == without) is (name == "Phi3")
    assert tokenizer.encode("<s>\nthe").ids != tokenizer.encode("<s>the").ids


@pytest.mark.parametrize(
    "values, message",
    [
        ({"model": "bert"}, "the unsupported kind 'bert'"),
        ({"pre": "martian"}, "'martian' is not supported; choose one of: gpt-2"),
        ({"tokens": ["a", "b", "a"]}, "the token 'a' twice"),
        ({"merges": ["h zz"]}, "a merge outside its vocabulary, 'h zz'"),
        ({"eos_token_id": 9999}, "eos_token_id = 9999, of 259 tokens"),
        ({"model": "llama", "scores": [1.0]}, "1 scores of 259 tokens"),
    ],
)
def test_invalid_metadata_is_refused(build, values, message):
    with pytest.raises(UserError, match=message):
        build({f"tokenizer.ggml.{key}": value for key, value in values.items()})


@pytest.mark.parametrize("kinds", [True, False])
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("[EOT]", True),
        ("<\uff5cend\u2581of\u2581sentence\uff5c>", True),
        # In byte-level vocabularies it is text: an end tag of HTML.
        ("</s>", False),
        ("<|user_turn|>", False),
    ],
)
def test_tokens_that_end_a_turn_do_so_whatever_their_type(
    byte_level, name, ends, kinds
):
    tokens = [name, *byte_level.tokens[1:]]
    normal = [gguf.TokenType.NORMAL] * len(tokens) if kinds else None
    embedded = byte_level("smollm", tokens=tokens, eos_token_id=1, token_type=normal)
    assert embedded.end_tokens == ((1, 0) if ends else (1,))
    # Control tokens of files without types are known by their form.
    control = ends or (name == "<|user_turn|>" and not kinds)
    assert (embedded.tokenizer.encode(f"the{name}").ids[-1] == 0) is control


# Names of llama.cpp; only the first one of each kind of filling in ends a text.
ENDS = [
    "<|eot_id|>", "<|im_end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<eos>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "<|end_of_text|>", "<turn|>", "[e~[", "<end_of_utterance>",
    "<|tool_response>",
]  # fmt: skip
INFILL = {
    "fim_pad": ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    "fim_rep": ["<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"],
    "fim_sep": ["<|file_sep|>"],
}


def test_every_end_token_of_llama_cpp(byte_level):
    def ends(*names, sentence=False, **values):
        tokens = [*byte_level.tokens, *names]
        kinds = [gguf.TokenType.NORMAL] * len(tokens)
        kinds[-1] = gguf.TokenType.CONTROL if sentence else kinds[-1]
        fields = {"tokens": tokens, "token_type": kinds, "eos_token_id": 1, **values}
        return {tokens[id] for id in byte_level("smollm", **fields).end_tokens[1:]}

    assert ends() == {"<|end|>"}
    # <|end|> ends a part where there are tokens for a call and for the text.
    assert ends(*ENDS) == set(ENDS)
    assert ends("<|call|>", "<|return|>") == {"<|call|>", "<|return|>"}
    assert ends("<|return|>", "<|flush|>") == {"<|return|>", "<|flush|>", "<|end|>"}
    assert ends("</s>", sentence=True) == {"<|end|>", "</s>"}
    both = ends("<|tool_response>", "</s>", sentence=True)
    assert both == {"<|end|>", "<|tool_response>"}
    for key, names in INFILL.items():
        for name in names:
            assert ends(name) == {"<|end|>", name}
        assert ends(*names[1:], names[0]) == {"<|end|>", names[0]}
        given = ends(*names, **{f"{key}_token_id": 9})
        assert given == {"<|end|>", byte_level.tokens[9]}
