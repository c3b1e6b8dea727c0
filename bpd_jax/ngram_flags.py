"""Flags that `bpd_jax.count_ngrams` and `bpd_jax.build_ngram` share: what to count."""

from absl import flags

TASK = flags.DEFINE_string(
    "task", None, "Text task such as stdlib, or a registered seqio task."
)
TEXT = flags.DEFINE_string("text", None, "Glob of .txt, .jsonl or .jsonl.gz files.")
TOKENS = flags.DEFINE_string(
    "tokens",
    None,
    "Glob of files of token ids: a sequence per line, plain or gzip; or .npy arrays. "
    "'**' crosses folders.",
)
GENERATIONS = flags.DEFINE_string(
    "generations", None, "Folder of texts that a model wrote: see bpd_jax.distill."
)
VOCABULARY = flags.DEFINE_string(
    "vocabulary",
    "gpt3",
    "Of text: gpt3, bpe:N, a tokenizer.json or a folder that has one.",
)
SPLIT = flags.DEFINE_string(
    "split",
    None,
    "For --task, --text and --generations: train, validation or all. Default: all for "
    "--text, else train.",
)
MAX_BYTES = flags.DEFINE_integer(
    "max_bytes", None, "For --task and --text: bytes of text to take. Default: all."
)
VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size", None, "Of files of ids: vocabulary size. Default: highest id plus 1."
)
END_OF_TEXT = flags.DEFINE_integer(
    "end_of_text", None, "Of files of ids: token that stands for a sequence's ends."
)
# Read with `cli.whole_numbers` and `cli.byte_count`.
flags.DEFINE_list(
    "min_counts", None, "Least count of an n-gram, per order: 1,1,2,4. Default: all 1."
)
flags.DEFINE_string(
    "memory", "4GB", "Memory for counting, about; more text goes through the disk."
)
