import pytest

from bpd_jax.data.quiet_tensorflow import tf
from bpd_jax.data.seqio_vocabulary import TokenizerVocabulary
from bpd_jax.data.tokenizer import gpt3_tokenizer, train_bpe

TEXTS = ["Hello, world!", "", "a <|endoftext|> b\0", "naïve 😀\r\n"]


@pytest.fixture(scope="module")
def vocabulary():
    return TokenizerVocabulary(gpt3_tokenizer)


def test_python_and_tensorflow_encode_identically(vocabulary):
    assert vocabulary.vocab_size == 50257
    assert vocabulary.eos_id == vocabulary.bos_id == 50256
    expected = [gpt3_tokenizer().encode(text) for text in TEXTS]
    assert [vocabulary.encode(text) for text in TEXTS] == expected
    assert vocabulary.encode_tf(tf.constant(TEXTS)).to_list() == expected
    for text, ids in zip(TEXTS, expected, strict=True):
        encoded = vocabulary.encode_tf(tf.constant(text))
        assert encoded.dtype == tf.int32
        assert encoded.numpy().tolist() == ids


def test_decode_is_lossless_and_stops_at_the_end_of_text(vocabulary):
    # '!' has id 0, which seqio's vocabularies drop as padding.
    for text in [*TEXTS, "!!! wow!"]:
        assert vocabulary.decode(vocabulary.encode(text)) == text
        assert vocabulary.decode_tf(vocabulary.encode_tf(text)).numpy() == text.encode()
    ids = [15496, 995, 50256, 0, 0]
    assert vocabulary.decode(ids) == "Hello world"
    assert vocabulary.decode_tf(tf.constant(ids)).numpy() == b"Hello world"
    rows = tf.constant([[15496, 0, 0], [50256, 0, 0]])
    assert vocabulary.decode_tf(rows).numpy().tolist() == [b"Hello!!", b""]


def test_vocabularies_are_equal_if_their_tokenizers_are(vocabulary):
    assert vocabulary == TokenizerVocabulary(lambda: gpt3_tokenizer())
    assert hash(vocabulary) == hash(TokenizerVocabulary(lambda: gpt3_tokenizer()))
    different = TokenizerVocabulary(lambda: train_bpe(["a b a b"], 257))
    assert vocabulary != different
    assert vocabulary != "gpt3"
