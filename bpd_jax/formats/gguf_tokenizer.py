"""The tokenizer inside a GGUF file, as one of the package `tokenizers`.

Two kinds are supported. `gpt2` is byte-level BPE: a text is split by the
pre-tokenizer's patterns, one after the other, then merged. `llama` is SentencePiece's
BPE: spaces are ▁, pieces merge in the order of their scores, and characters outside the
vocabulary become bytes. Text is never normalised, so that decoding restores it.
"""

import re
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from bpd_jax.base.errors import UserError, warn
from bpd_jax.formats.gguf_file import GGUFFile

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _gpt4(digits: str) -> str:
    words = rf"{_CONTRACTION}|{_BEFORE}\p{{L}}+"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _gpt4o(digits: str, ending: str) -> str:
    """Words end where lower case is followed by upper case.

    These are the models' own patterns; llama.cpp sees the case of ASCII letters only.
    """
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_LLAMA3, _QWEN2 = _gpt4(r"\p{N}{1,3}"), _gpt4(r"\p{N}")

# Texts begin with the begin token unless the file says otherwise, and words that are
# tokens need no merges.
_COMPLETE = ("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "tekken")

# Every digit is a word of its own.
_DIGITS_APART = (
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    "minerva-7b",
)

# The patterns of each pre-tokenizer, applied one after the other.
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jais", "mpt", "olmo", "trillion"), (_GPT2,)),
    **dict.fromkeys(_DIGITS_APART, (r"\p{N}", _GPT2)),
    **dict.fromkeys((*_COMPLETE, "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    "gpt-4o": (_gpt4o(r"\p{N}{1,3}", _CONTRACTION + "?"),),
    "tekken": (_gpt4o(r"\p{N}", ""),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_BYTE_NAME = re.compile("<0x[0-9A-F]{2}>")

# Names of tokens that end a text or a turn whatever their type, as in llama.cpp: some
# files give them the type of ordinary text.
_END_NAMES = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<|tool_response>", "<end_of_turn>", "<turn|>", "<eos>", "<EOT>", "_<EOT>"),
    *("[EOT]", "[EOS]", "[e~[", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "<end_of_utterance>",
)
# Tokens of filling in code that end a text: where the file does not have the id, the
# first of these names.
_INFILL_NAMES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Ends a text only as a control token: elsewhere it may be the end tag of HTML. Where
# there is the other token, it never does (Gemma 4).
_END_OF_SENTENCE, _UNLESS = "</s>", "<|tool_response>"
# Ends a part of a text, not the text, where one of each of these is (gpt-oss, Solar).
_END_OF_PART = "<|end|>"
_PARTS = ({"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"})

# Ids of the special tokens of SentencePiece that a file does not have.
_USUAL_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# Special tokens of Phi-3 that do not remove the blanks after them, as the others do.
_BLANKS_STAY = ("<unk>", "<s>", "<|endoftext|>")

# What special tokens look like in files without types.
_SPECIAL_NAME = re.compile(r"<\|[^|<>]+\|>|<(bos|eos|pad|unk|start_of_turn)>")

# The longest token of a published vocabulary has a few hundred characters.
_LONGEST_TOKEN = 1024


class EmbeddedTokenizer(NamedTuple):
    """A tokenizer with its begin and end tokens, as in `Checkpoint`."""

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    begin_of_text: int | None
    begin_text: str
    end_tokens: tuple[int, ...]


def read_tokenizer(file: GGUFFile, vocab_size: int) -> EmbeddedTokenizer:
    """Builds the tokenizer of a checkpoint.

    The embedding has `vocab_size` rows, possibly more than there are tokens.
    """
    kind = file.get("tokenizer.ggml.model", str)
    tokens = file.get("tokenizer.ggml.tokens", list)
    if len(tokens) > vocab_size:
        raise _damaged(file, f"{len(tokens)} tokens for {vocab_size} embeddings")
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(x for id, x in enumerate(tokens) if vocabulary[x] != id)
        raise _damaged(file, f"the token {twice[:80]!r} twice")
    if max(map(len, tokens), default=0) > _LONGEST_TOKEN:
        raise _damaged(file, f"a token of more than {_LONGEST_TOKEN} characters")
    kinds = file.find("tokenizer.ggml.token_type", np.ndarray)
    has_kinds = kinds is not None
    kinds = np.array(kinds) if has_kinds else np.full(len(tokens), _NORMAL)
    if len(kinds) != len(tokens):
        raise _damaged(file, f"{len(kinds)} kinds of {len(tokens)} tokens")
    if not has_kinds:
        _guess_kinds(file, kind, vocabulary, kinds)
    end_tokens = _end_tokens(file, vocabulary, kinds)

    if kind == "gpt2":
        pre = file.find("tokenizer.ggml.pre", str)
        if pre is None:
            warn(
                f"{file.path} does not name its pre-tokenizer (tokenizer.ggml.pre): "
                "texts are split in llama.cpp's default way, which may differ from the "
                "model's; convert it again."
            )
            pre = "default"
        tokenizer = _byte_level(file, vocabulary, pre)
        begins = pre in _COMPLETE
    elif kind == "llama":
        tokenizer = _sentencepiece(file, vocabulary, kinds)
        begins = True
    else:
        raise UserError(
            f"{file.path} has a tokenizer of the unsupported kind {kind!r}; supported "
            "are gpt2 (byte-level BPE) and llama (SentencePiece BPE)."
        )
    name = (file.find("general.name", str) or "").lower()
    strips = "phi-3" in name or "phi3" in name
    for number, special in ((_UNKNOWN, True), (_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            tokenizers.AddedToken(
                tokens[id],
                special=special,
                normalized=False,
                rstrip=strips and tokens[id] not in _BLANKS_STAY,
            )
            for id in np.flatnonzero(kinds == number)
            if tokens[id]
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)

    declared = file.find("tokenizer.ggml.add_bos_token", bool)
    begins = begins if declared is None else declared
    if not end_tokens:
        raise UserError(
            f"{file.path} does not name the end-of-text token "
            "(tokenizer.ggml.eos_token_id): convert it again."
        )
    begin = _declared(file, "bos", len(tokens))
    return EmbeddedTokenizer(
        tokenizer,
        file.find("tokenizer.chat_template", str),
        _id(file, "bos", len(tokens)) if begins else None,
        tokens[begin] if begin is not None and 0 <= begin < len(tokens) else "",
        end_tokens,
    )


def _guess_kinds(
    file: GGUFFile, kind: str, vocabulary: dict[str, int], kinds: np.ndarray
) -> None:
    """Finds the special tokens of a file without types."""
    size = len(vocabulary)
    ids = [_id(file, name, size) for name in ("bos", "eos", "eot", "eom")]
    ids += [id for name, id in vocabulary.items() if _SPECIAL_NAME.fullmatch(name)]
    if kind == "llama":
        ids += [vocabulary.get(name) for name in ("<s>", _END_OF_SENTENCE)]
        for name, id in vocabulary.items():
            if _BYTE_NAME.fullmatch(name):
                kinds[id] = _BYTE
    kinds[[id for id in ids if id is not None]] = _CONTROL


def _end_tokens(
    file: GGUFFile, vocabulary: dict[str, int], kinds: np.ndarray
) -> tuple[int, ...]:
    """The tokens that end a text; makes those known by name control tokens."""
    size = len(vocabulary)
    named = [vocabulary.get(name) for name in _END_NAMES]
    declared = [_id(file, name, size) for name in ("eos", "eot", "eom")]
    infill = [_id(file, name, size) for name in _INFILL_NAMES]
    for id, names in zip(infill, _INFILL_NAMES.values(), strict=True):
        if id is None:
            named.append(next((vocabulary[x] for x in names if x in vocabulary), None))
    for id in named:
        if id is not None and kinds[id] != _UNKNOWN:
            kinds[id] = _CONTROL
    sentence = vocabulary.get(_END_OF_SENTENCE)
    if sentence is not None and kinds[sentence] == _CONTROL:
        named.append(sentence)
    never = {None, sentence if _UNLESS in vocabulary else None}
    part = vocabulary.get(_END_OF_PART)
    if part is not None and all(names & vocabulary.keys() for names in _PARTS):
        never.add(part)
        kinds[part] = _USER_DEFINED
    ends = dict.fromkeys((*declared, *named, *infill))
    return tuple(id for id in ends if id is not None and id not in never)


def _byte_level(
    file: GGUFFile, vocabulary: dict[str, int], pre: str
) -> tokenizers.Tokenizer:
    if pre not in _PATTERNS:
        raise UserError(
            f"{file.path}: the pre-tokenizer {pre!r} is not supported; choose one of: "
            f"{', '.join(_PATTERNS)}."
        )
    merges = []
    for merge in file.get("tokenizer.ggml.merges", list):
        # The separator is never the first character.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= vocabulary.keys():
            raise _damaged(file, f"a merge outside its vocabulary, {merge[:80]!r}")
        merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, ignore_merges=pre in _COMPLETE)
    )
    patterns = map(tokenizers.Regex, _PATTERNS[pre])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(pattern, "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    file: GGUFFile, vocabulary: dict[str, int], kinds: np.ndarray
) -> tokenizers.Tokenizer:
    """The tokenizer of Llama and Llama 2."""
    scores = file.get("tokenizer.ggml.scores", np.ndarray).astype(np.float64)
    if len(scores) != len(vocabulary):
        raise _damaged(file, f"{len(scores)} scores of {len(vocabulary)} tokens")
    unknown = _id(file, "unknown", len(vocabulary))
    names = list(vocabulary)
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, kinds, scores),
            unk_token=None if unknown is None else names[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    encoding: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.find("tokenizer.ggml.add_space_prefix", bool) is not False:
        encoding = [normalizers.Prepend("▁"), *encoding]
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(encoding)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(
    vocabulary: dict[str, int], kinds: np.ndarray, scores: np.ndarray
) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a third, in the order of its score.

    SentencePiece stores no merges: it always joins to the piece with the best score.
    """
    normal = {token: id for token, id in vocabulary.items() if kinds[id] == _NORMAL}
    pairs = []
    for token, id in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                # Ties are ordered as in Hugging Face's converter.
                rank = (-scores[id], -len(left), -len(right), normal[left])
                pairs.append((rank, (left, right)))
    return [pair for _, pair in sorted(pairs)]


def _declared(file: GGUFFile, name: str, size: int) -> int | None:
    """The id of a special token such as `bos` in a file; None if it has none."""
    id = file.find(f"tokenizer.ggml.{name}_token_id", int)
    if id is None and file.find("tokenizer.ggml.model", str) == "llama":
        id = _USUAL_IDS.get(name)
        return id if id is not None and id < size else None
    return id


def _id(file: GGUFFile, name: str, size: int) -> int | None:
    """The id of a special token; refuses one outside the vocabulary."""
    id = _declared(file, name, size)
    if id is not None and not 0 <= id < size:
        reason = f"tokenizer.ggml.{name}_token_id = {id}, of {size} tokens"
        raise _damaged(file, reason)
    return id


def _damaged(file: GGUFFile, reason: str) -> UserError:
    return UserError(f"{file.path}: its tokenizer has {reason}: convert it again.")
