"""The Python interface: loads a model and decodes texts with any method."""

import codecs
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from bpd_jax.base.errors import UserError
from bpd_jax.base.host_memory import return_freed_memory
from bpd_jax.data.text_readers import check_texts
from bpd_jax.decoding.asset_files import ASSET_FOLDERS, find_tuning, with_assets
from bpd_jax.decoding.decode_state import cut_at_stop
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.generate import Generation, check_prompts
from bpd_jax.decoding.loaded_model import LanguageModel, Prompt, is_conversation
from bpd_jax.decoding.loading import load_model
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import AUTO, Method
from bpd_jax.decoding.options import DecodeConfig, DecodeOptions
from bpd_jax.models import device_ops
from bpd_jax.models.decoding_parameters import check_precision
from bpd_jax.models.device_ops import on_cpu
from bpd_jax.models.mesh import MeshConfig, decoding_mesh
from bpd_jax.models.transformer_config import INT8, PRECISIONS
from bpd_jax.training import hosts

# How `load` keeps matrices.
WEIGHTS = STORED, EXPANDED, _ = "stored", "expanded", INT8


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """One decoded prompt.

    Attributes:
      text: the decoded text without the end-of-text token, up to a stop text.
      method: the method that decoded it.
      generation: the decoded tokens, with a record of every serial call.
    """

    text: str
    method: Method
    generation: Generation

    @property
    def block_efficiency(self) -> float:
        """Decoded tokens per serial call of the model (paper section 5)."""
        return self.generation.block_efficiency


def load(
    name: str,
    *,
    heads: str | None = None,
    weights: str | None = None,
    chat: bool = True,
    template: Mapping[str, Any] | None = None,
    precision: str | None = None,
    mesh: Mesh | MeshConfig | None = None,
    weights_dtype: str | None = None,
    **assets: str | None,
) -> LanguageModel:
    """Loads a model and the assets of its drafting methods.

    Args:
      name: a run folder, one of its checkpoints, a Hugging Face folder, a GGUF file, or
        a known name such as `smollm2`.
      heads: folder of block heads for a pretrained model; None for its own.
      weights: folder with the file of a known model in parts; see `load_model`.
      chat: whether prompts are user messages, if the model has a chat template.
      template: further variables of the chat template, such as
        `{"enable_thinking": False}`.
      precision: dtype of activations and matrix products; None for the model's own.
        `int8`: matrices that are not quantized are rounded to 8 bits, and activations
        where they are multiplied, which changes texts; every method decodes the same.
      mesh: devices that share the parameters, the heads of the cache and the rows of
        batches, or the sizes of the axes of such a mesh; None for the first device.
        Drafters, n-gram models and small LMs are on every device.
      weights_dtype: `stored`: quantized matrices of a GGUF file stay as they are stored
        and are expanded where they are multiplied; `expanded`: they are expanded to
        float32 on loading; `int8`: matrices that are not quantized, on accelerators
        all, are rounded to 8 bits, which changes texts. None is `stored` where that is
        faster with the same results: in float32 on a CPU with vectors.
      **assets: folders of `ngram`, `rescorer`, `draft_model`, `markov`, `drafter`
        or `eagle`; by default those in the model's folder.
    """
    for asset in assets:
        if asset not in ASSET_FOLDERS:
            names = ", ".join(ASSET_FOLDERS)
            raise UserError(f"unknown asset {asset!r}: choose from {names}.")
    devices = decoding_mesh(mesh)
    for setting, value, known in (
        ("weights_dtype", weights_dtype, WEIGHTS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in (None, *known):
            raise UserError(f"{setting} is one of {', '.join(known)}, not {value!r}.")
    if weights_dtype == INT8 and hosts.count() > 1:
        raise UserError("weights_dtype=int8 is for one process: leave it out.")
    fast = devices is None and device_ops.current().multiplies_quantized(precision)
    stored = weights_dtype == STORED or (weights_dtype is None and fast)
    # Rounding to blocks leaves what is quantized.
    stored |= weights_dtype == INT8 and on_cpu(devices)
    rounds = weights_dtype == INT8
    check = functools.partial(
        check_precision, mesh=devices, precision=precision, rounds=rounds
    )
    loaded = load_model(name, heads, weights, devices, stored=stored, check=check)
    loaded = loaded if chat else loaded.without_chat()
    loaded = loaded.with_template(template)
    loaded = with_assets(loaded, assets)
    loaded = loaded.for_decoding(precision, rounds=rounds)
    # What matrices were arranged or rounded from.
    return_freed_memory()
    return loaded


def generate(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    method: str | Method | None = None,
    *,
    lattice_width: int = DecodeConfig.lattice_width,
    alpha: float = DecodeConfig.alpha,
    on_progress: Callable[[int], object] = lambda tokens: None,
    template: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Completion]:
    """Decodes prompts, and returns one completion for each, in order.

    Args:
      lm: a model from `load`.
      prompts: texts, conversations or token ids.
      method: a method or its text, as in `--method=help`; `auto` measures which is
        fastest on this device; None is `Decoder.default_method`.
      lattice_width: candidates per head (the paper's k), unless the method sets k.
      alpha: weight of the refiners, unless the method sets alpha; trained refiners
        have their own default.
      on_progress: called after each batch with the number of new tokens.
      template: further variables of the chat template, such as
        `{"enable_thinking": False}`.
      **options: fields of `DecodeOptions`, such as `max_new_tokens` or `temperature`.
    """
    decode_options = _options(lm, options)
    decoder = lm.decoder(lattice_width=lattice_width, alpha=alpha)
    if isinstance(prompts, str):
        raise UserError(f"prompts must be a list of texts, not the text {prompts!r}.")
    check_texts(prompts)
    tokens = _encoded(lm, prompts, template)
    chosen = resolve(lm, decoder, method, tokens, decode_options)
    texts = decoder.decode(chosen, tokens, decode_options, on_progress=on_progress)
    return [
        Completion(visible_text(lm, text.output_ids, decode_options), chosen, text)
        for text in texts
    ]


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    method: str | Method | None = None,
    *,
    lattice_width: int = DecodeConfig.lattice_width,
    alpha: float = DecodeConfig.alpha,
    template: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[str]:
    """Decodes one prompt and yields its text incrementally; see `generate`."""
    decode_options = _options(lm, options)
    decoder = lm.decoder(lattice_width=lattice_width, alpha=alpha)
    check_texts([prompt])
    [tokens] = _encoded(lm, [prompt], template)
    chosen = resolve(lm, decoder, method, [tokens], decode_options)
    pieces = decoder.stream(chosen, tokens, decode_options)
    return (piece for piece, _ in visible_pieces(lm, pieces, decode_options))


def resolve(
    lm: LanguageModel,
    decoder: Decoder,
    method: str | Method | None,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
    *,
    verbose: bool = False,
) -> Method:
    """Returns the method to decode with.

    `auto` is the choice of `bpd_jax.tune` on this device, or else the fastest of some
    methods on these prompts; None is `Decoder.default_method`. If `verbose`, the choice
    of `auto` and its reason are printed.
    """
    if method is None:
        from bpd_jax.decoding.call_price import with_measured_price

        default = decoder.default_method
        return with_measured_price(decoder, default, prompts, options)
    method = parse_method(method)
    if method != AUTO:
        return method
    from bpd_jax.decoding.choice import candidate_methods, choose_method

    check_prompts(decoder.model, prompts, options)
    tuned = tuned_method(lm, options.batch_size)
    if tuned is not None:
        if verbose:
            print(f"auto: {tuned.name}, the choice of bpd_jax.tune on this device.")
        return tuned
    methods = candidate_methods(decoder, prompts, options)
    if verbose:
        print(
            f"auto: compiling {len(methods)} methods, then decoding with each; run "
            "python -m bpd_jax.tune to save the choice.",
            file=sys.stderr,
        )
    choice = choose_method(decoder, prompts, options, methods=methods)
    if verbose:
        print(f"auto: {choice}")
    return choice.method


def tuned_method(lm: LanguageModel, batch_size: int) -> Method | None:
    """The choice of `bpd_jax.tune` on this device for a batch size, if it has run."""
    from bpd_jax.base.provenance import device
    from bpd_jax.decoding.choice import tuned_choice

    tuning = find_tuning(lm)
    if tuning is None:
        return None
    return tuned_choice(*tuning, hosts.agree(device()), batch_size)


def visible_text(
    lm: LanguageModel, tokens: Sequence[int] | np.ndarray, options: DecodeOptions
) -> str:
    """The text of decoded tokens, up to the end of text or a stop text."""
    shown = [int(token) for token in tokens if token not in options.end_tokens]
    return cut_at_stop(lm.tokenizer.continuation(shown), options.stop)


class VisibleText:
    """The text of tokens that are added incrementally.

    An incomplete character or a possible beginning of a stop text is held back.
    """

    def __init__(self, lm: LanguageModel, options: DecodeOptions) -> None:
        self._lm, self._options = lm, options
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped = False
        self._longest = max((len(text) for text in options.stop), default=1)

    def add(self, tokens: np.ndarray, last: bool) -> str:
        """Adds tokens `[n]`, and returns the new text that can be shown."""
        ends = self._options.end_tokens
        shown = [int(token) for token in tokens if token not in ends]
        pieces = map(self._lm.tokenizer.piece_bytes, shown)
        text = self._held + self._bytes.decode(b"".join(pieces), final=last)
        if self._stopped:
            return ""
        cut = cut_at_stop(text, self._options.stop)
        self._stopped = cut != text
        # The end of the text may be the beginning of a stop text.
        ready = len(text) if last else max(len(text) - self._longest + 1, 0)
        piece = cut if self._stopped else text[:ready]
        self._held = text[len(piece) :]
        return piece


def visible_pieces(
    lm: LanguageModel,
    pieces: Iterator[tuple[np.ndarray, Generation | None]],
    options: DecodeOptions,
) -> Iterator[tuple[str, Generation | None]]:
    """Pieces of text without incomplete characters or possible stop texts."""
    text = VisibleText(lm, options)
    for new, generation in pieces:
        yield text.add(new, generation is not None), generation


def marked_pieces(
    lm: LanguageModel,
    pieces: Iterator[tuple[np.ndarray, Generation | None]],
    options: DecodeOptions,
) -> Iterator[tuple[str, bool, Generation | None]]:
    """`visible_pieces`, split into the first token of a call and its draft tokens.

    Pieces are from `generate.stream` with `calls=1`. Yields a text, whether its tokens
    are accepted draft tokens, and the complete generation with the last text, otherwise
    None.
    """
    text = VisibleText(lm, options)
    for new, generation in pieces:
        last = generation is not None
        yield text.add(new[:1], last and len(new) <= 1), False, None
        yield text.add(new[1:], last), True, generation


def _encoded(
    lm: LanguageModel, prompts: Sequence[Prompt], template: Mapping[str, Any] | None
) -> list[np.ndarray]:
    if template and not all(isinstance(p, str) or is_conversation(p) for p in prompts):
        raise UserError(
            "template has no effect on a prompt of token ids: leave it out, or give a "
            "text or a conversation."
        )
    lm = lm.with_template(template)
    return [lm.encode(prompt) for prompt in prompts]


def _options(lm: LanguageModel, fields: dict[str, Any]) -> DecodeOptions:
    names = [field.name for field in dataclasses.fields(DecodeOptions)]
    for name in fields:
        if name not in names:
            raise UserError(f"unknown option {name!r}: choose from {names}.")
    if fields.get("end_of_text", ()) is None:
        del fields["end_of_text"]
    fields = {**lm.option_defaults, **fields}
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    return DecodeOptions(**fields)
