"""Flags and set-up that `bpd_jax.decode` and `bpd_jax.evaluate` share."""

from absl import flags

from bpd_jax import progress
from bpd_jax.decoding.assets import Assets
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.loading import NGRAM_FOLDER, LoadedModel
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.ngrams.formats.load import load_model
from bpd_jax.ngrams.model import NGramModel

MODEL = flags.DEFINE_string(
    "model", None, "run folder, checkpoint folder, or a known name (demo)."
)
PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", None, "one prompt per line, or JSON Lines with the field prompt."
)
MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "tokens to decode.")
NGRAM = flags.DEFINE_string(
    "ngram",
    None,
    "folder of an n-gram model, or a file of one: ARPA with token ids, or OpenFst "
    "(.fst); default: ngram/ in the run folder.",
)
LATTICE_WIDTH = flags.DEFINE_integer("lattice_width", 16, "candidates per head (k).")
ALPHA = flags.DEFINE_float("alpha", 1.0, "weight of the n-gram's log-probability.")
BATCH_SIZE = flags.DEFINE_integer("batch_size", 1, "prompts decoded together.")


def make_decoder(loaded: LoadedModel) -> Decoder:
    """The decoder that the flags describe.

    The n-gram model is the one that `--ngram` names, else the run folder's own, if
    it has one.
    """
    return Decoder(
        loaded.functions,
        loaded.params,
        width=LATTICE_WIDTH.value,
        alpha=ALPHA.value,
        assets=Assets(ngram=_load_ngram(loaded, NGRAM.value)),
        token_bytes=loaded.tokenizer.all_bytes,
    )


def _load_ngram(loaded: LoadedModel, name: str | None) -> NGramModel | None:
    own = loaded.folder / NGRAM_FOLDER
    if name is None:
        return NGramModel.load(own) if own.is_dir() else None
    return load_model(
        name,
        vocab_size=loaded.tokenizer.vocab_size,
        end_of_text=loaded.tokenizer.end_of_text,
    )


def token_bar(label: str, prompts: int, options: DecodeOptions) -> "progress.tqdm":
    """A progress bar over tokens; texts that end early leave it short."""
    total = prompts * options.max_new_tokens
    return progress.bar(label=label, total=total, unit=" tokens")
