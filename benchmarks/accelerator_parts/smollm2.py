"""A pretrained model with its drafters: each method alternates with plain decoding."""

import contextlib
import dataclasses
import pathlib
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

from benchmarks.accelerator_parts.jobs import Job, JobSettings, Row
from bpd_jax.base.errors import UserError
from bpd_jax.decoding.compare import MethodResult, compare, compile_methods
from bpd_jax.decoding.decoder import Decoder
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.loading import find_packaged
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import DecodeOptions
from bpd_jax.evaluation import decode_flags
from bpd_jax.evaluation.efficiency import block_efficiency
from bpd_jax.evaluation.token_cost import model_size
from bpd_jax.formats.file_parts import gather_parts

# Methods beside the default one. Those whose assets the model lacks are left out.
METHODS = (
    "bpd",
    "ngram_device:16",
    "block/tree:32",
    "block+ngram:alpha=0.25/tree:32",
    "prompt_lookup:8",
    "heads+ngram:alpha=0.25/tree:32",
    "block",
)


def jobs(settings: JobSettings) -> Iterator[Job]:
    """One job for each batch size and method, so that results come early."""
    if flags.FLAGS["model"].value is None:
        flags.FLAGS["model"].value = "smollm2"
        _find_weights()
    if flags.FLAGS["precision"].value is None:
        flags.FLAGS["precision"].value = settings.dtype
    loaded, decoder, config = decode_flags.load(decode_flags.config())
    texts = decode_flags.prompt_texts()
    if not texts:
        raise UserError("--prompts_file is missing: name a file of prompts.")
    new_tokens = 6 if settings.tiny else 64
    for batch in settings.batch_sizes:
        options = dataclasses.replace(
            config.options, batch_size=batch, max_new_tokens=new_tokens
        )
        # Prompts are repeated to fill whole batches.
        count = max(batch, min(len(texts), 8 if batch == 1 else 32) // batch * batch)
        prompts = [
            loaded.encode_prompt(texts[index % len(texts)]) for index in range(count)
        ]
        for method in measured_methods(decoder):
            yield (
                f"{loaded.name}, batch {batch}, {method.name}",
                lambda method=method, prompts=prompts, options=options: _measured(
                    settings, loaded, decoder, method, prompts, options
                ),
            )


def _find_weights() -> None:
    """Sets --weights to the parts of the bundles, unless it or the package is there."""
    if decode_flags.WEIGHTS.value is not None:
        return
    with contextlib.suppress(UserError):
        find_packaged("smollm2")
        return
    here = pathlib.Path.cwd()
    folders = [here / "weights", *here.parent.glob("*/weights")]
    target = here / "build" / "weights"
    if gather_parts(folders, target):
        flags.FLAGS["weights"].value = str(target)


def _measured(
    settings: JobSettings,
    loaded: LanguageModel,
    decoder: Decoder,
    method: Method,
    prompts: Sequence[np.ndarray],
    options: DecodeOptions,
) -> Row:
    compile_methods(decoder, [method], prompts, options)
    plain, drafted = compare(
        decoder, [method], prompts, options, rounds=settings.rounds
    )
    return {
        "dtype": loaded.config.trunk.dtype,
        "parameters": model_size(loaded.config).trunk_parameters,
        "prompts": len(prompts),
        "new_tokens": options.max_new_tokens,
        "tokens_per_call": block_efficiency(drafted.generations),
        "plain_tokens_per_second": _speed(plain),
        "tokens_per_second": _speed(drafted),
        "speedup": drafted.speedup(plain),
        "seconds": list(drafted.seconds),
        "texts_that_differ": len(drafted.differences),
        "of_them_near_ties": len(drafted.differences) - len(drafted.errors),
        "passed": not drafted.errors,
    }


def _speed(result: MethodResult) -> float:
    """Tokens per second, the median over rounds."""
    tokens = sum(len(text.output_ids) for text in result.generations)
    return tokens / statistics.median(result.seconds)


def measured_methods(decoder: Decoder) -> list[Method]:
    """The methods of `METHODS` that the model has assets for, and its default one."""
    methods = []
    for method in dict.fromkeys([*map(parse_method, METHODS), decoder.default_method]):
        with contextlib.suppress(UserError):
            decoder.drafter(method)
            methods.append(method)
    return methods
