"""Generates a model's own continuations of prompts, for training block heads.

    python -m bpd_jax.distill --model=smollm2 --made_up_prompts=1000 \\
        --prompts_file=questions.jsonl --output=runs/smollm2/texts

Prompts are read from files; a model with a chat template can also generate them. They
are decoded greedily or by sampling, in a batch whose rows are refilled as they finish,
and written in shards of 256 texts. The same command resumes an interrupted run, which
loses at most the texts of the current shard.

With --states=FOLDER the model's states are written too. Training heads or a block
drafter needs them (`HeadsTrainConfig.states`) and otherwise runs the model again:

        --states=runs/smollm2/states --feature_layers=2,15,28 --states_dtype=bfloat16
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from bpd_jax.base.host_memory import keep_freed_memory
from bpd_jax.base.settings import each, integer, parse_value
from bpd_jax.data.generations import (
    HEADER,
    KIND,
    open_generations,
    read_header,
    shard_paths,
    write_header,
)
from bpd_jax.data.tokenizer import FILE_NAME as TOKENIZER
from bpd_jax.decoding import distillation
from bpd_jax.decoding.decoder import GREEDY, Decoder
from bpd_jax.decoding.loaded_model import LanguageModel
from bpd_jax.decoding.method_text import parse_method
from bpd_jax.decoding.methods import Method
from bpd_jax.decoding.options import ADJUSTMENTS, DecodeOptions
from bpd_jax.evaluation import decode_flags
from bpd_jax.models.transformer_config import check_feature_layers, usual_layers
from bpd_jax.storage import files, folders
from bpd_jax.storage.paths import as_path
from bpd_jax.training import hosts, process_flags
from bpd_jax.training.heads.frozen_states import states_dtype
from bpd_jax.training.heads.heads_config import HeadsTrainConfig
from bpd_jax.training.heads.states_files import About, StatesWriter

OUTPUT = cli.DEFINE_path("output", None, "output folder for the texts.")
MADE_UP = flags.DEFINE_integer(
    "made_up_prompts",
    0,
    "number of prompts that the model generates, in addition to those of files.",
    lower_bound=0,
)
MADE_UP_TOKENS = flags.DEFINE_integer(
    "made_up_tokens",
    64,
    "maximum length of a generated prompt, in tokens.",
    lower_bound=1,
)
METHOD = flags.DEFINE_string(
    "method", GREEDY.name, "decoding method; any lossless one."
)
LONGEST = flags.DEFINE_integer(
    "longest_prompt",
    512,
    "maximum length of a prompt, in tokens; longer ones are skipped.",
    lower_bound=1,
)
ANSWERED_FOLDERS = cli.DEFINE_path(
    "answered",
    [],
    "another folder of texts, whose prompts are skipped; may be repeated.",
)

STATES = cli.DEFINE_path(
    "states", None, "folder for the model's states, which training on the texts needs."
)
FEATURE_LAYERS = flags.DEFINE_string(
    "feature_layers",
    None,
    "layers whose outputs are stored with the final hidden states, counted from 0, as "
    "a block drafter or conditioned heads need them, or `default` for those of a block "
    "drafter without FEATURE_LAYERS; with layers, those of prompts are stored too.",
)
cli.define_flags(HeadsTrainConfig, "states_dtype")

_PROMPTS = "prompts.json"
_MADE_UP_TOP_K = 100


def main() -> None:
    """Collects or generates prompts, decodes them, and writes shards."""
    keep_freed_memory()
    output = as_path(cli.required("output"))
    method = parse_method(METHOD.value)
    if method.is_oracle:
        raise UserError("the oracle needs decoded texts: choose another method.")
    folders.check_folder(output, KIND)
    for folder in ANSWERED_FOLDERS.value:
        read_header(folder)
    prompt_texts = decode_flags.prompt_texts()
    if not prompt_texts and MADE_UP.value < 1:
        raise UserError(
            "there are no prompts: give --prompts_file, or "
            "--made_up_prompts=1000 if the model has a chat template."
        )
    with hosts.only_writers(output):
        _distill(output, method, prompt_texts)


def _distill(output: pathlib.Path, method: Method, prompt_texts: list[str]) -> None:
    loaded, decoder, config = decode_flags.load(decode_flags.config())
    options = config.options
    if not options.lossless:
        raise UserError(
            "typical acceptance changes the distribution of the texts: choose exact."
        )
    if MADE_UP.value and loaded.chat is None:
        raise UserError(
            f"{loaded.name} has no chat template, so it cannot generate prompts: give "
            "--prompts_file."
        )
    inputs = [loaded.encode_prompt(text) for text in prompt_texts]
    states, layers = _states_writer(loaded, output)
    facts = _facts(loaded, options, inputs)
    _check_same(output, loaded, facts)
    # Validates the request before generating prompts, which takes long.
    decoder.check(method, _not_too_long(inputs), options)
    made_up = _made_up(output, loaded, decoder, options) if MADE_UP.value else []
    prompts = [*map(loaded.encode_prompt, made_up), *inputs]
    accepted = _not_too_long(prompts)
    if not accepted:
        raise UserError(
            f"no prompt has {LONGEST.value} tokens or fewer: raise --longest_prompt."
        )
    if len(accepted) < len(prompts):
        print(
            f"{len(prompts) - len(accepted)} prompts of more than {LONGEST.value} "
            "tokens are skipped."
        )
    decoder.check(method, accepted, options)
    # Nothing is written earlier: the files of a rejected command would make the
    # corrected command fail.
    hosts.first(lambda: _write_beginning(output, loaded, facts, made_up))
    done = distillation.answered_prompts(accepted, output)
    done = set(hosts.agree(sorted(done)))
    if done:
        print(f"{len(done)} of {len(accepted)} texts exist already.")
    elsewhere: set[int] = set()
    for folder in ANSWERED_FOLDERS.value:
        elsewhere |= distillation.answered_prompts(accepted, folder, same_prompts=False)
    if elsewhere - done:
        print(f"{len(elsewhere - done)} prompts are answered in other folders.")
    finished = done | elsewhere
    # In random order, so that texts of a run that is stopped early are a random sample.
    order = np.random.default_rng(options.seed).permutation(len(accepted)).tolist()
    waiting = [index for index in order if index not in finished]
    task = decoder.task(method, options)
    if STATES.value and waiting:
        unanswered = [accepted[index] for index in waiting]
        if states is not None:
            print(states.describe_size(unanswered, options.max_new_tokens))
        longest, dtype = max(map(len, unanswered)), states_dtype(_states_dtype())
        task = distillation.recording_states(task, longest, layers, dtype)
    decode_flags.print_mesh(task)
    # Texts are counted, because most end long before their limit.
    total = len(waiting)
    with progress.bar(label="writing", total=total, unit=" texts") as bar:
        distillation.distill(
            task,
            accepted,
            waiting,
            output,
            states=states,
            on_progress=lambda tokens: bar.update(),
        )
    print(f"{len(distillation.answered_prompts(accepted, output))} texts: {output}")


def _states_writer(
    loaded: LanguageModel, output: pathlib.Path
) -> tuple[StatesWriter | None, tuple[int, ...]]:
    """The writer of states, in process 0 if there are --states, and their layers."""
    trunk = loaded.config.trunk
    layers: tuple[int, ...] = ()
    if FEATURE_LAYERS.value == "default":
        layers = usual_layers(trunk.num_layers)
    elif listed := FEATURE_LAYERS.value:
        layers = parse_value("--feature_layers", listed, each(integer(0)))
    if not STATES.value:
        if layers:
            raise UserError("--feature_layers needs --states: name a folder for them.")
        return None, ()
    folder = as_path(STATES.value)
    if folder == output:
        raise UserError("--states and --output must be different folders.")
    precision = decode_flags.PRECISION.value
    check_feature_layers(layers, trunk.num_layers)
    if precision == "float16":
        raise UserError(
            "states for training are not of a model in float16: give another "
            "--precision, or leave out --states."
        )
    about = About(
        loaded.fingerprint,
        trunk.d_model,
        layers,
        _states_dtype(),
        precision or "float32",
        include_prompts=bool(layers),
    )
    texts = open_generations(output) if shard_paths(output) else None
    return hosts.first(lambda: StatesWriter(folder, about, texts)), layers


def _states_dtype() -> str:
    return flags.FLAGS.states_dtype or HeadsTrainConfig.states_dtype


def _not_too_long(prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [prompt for prompt in prompts if len(prompt) <= LONGEST.value]


def _facts(
    loaded: LanguageModel, options: DecodeOptions, inputs: Sequence[np.ndarray]
) -> dict[str, Any]:
    """The settings that determine the texts, and the files of the prompts."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in inputs:
        digest.update(np.int64(len(prompt)).tobytes())
        digest.update(np.asarray(prompt, np.int32).tobytes())
    chosen = json.loads(json.dumps(dataclasses.asdict(options)))
    del chosen["batch_size"]
    # Options that earlier versions lacked count only where they have an effect.
    for name in (*ADJUSTMENTS, "min_p"):
        if not chosen[name]:
            del chosen[name]
    return {
        "prompts_files": list(decode_flags.PROMPTS_FILE.value),
        "prompts_blake2b": digest.hexdigest(),
        "made_up_prompts": MADE_UP.value,
        "made_up_tokens": MADE_UP_TOKENS.value,
        "longest_prompt": LONGEST.value,
        "chat": decode_flags.CHAT.value,
        "template": list(decode_flags.TEMPLATE_ARG.value) or None,
        "precision": loaded.model.precision,
        "options": chosen,
    }


def _check_same(output: pathlib.Path, loaded: LanguageModel, facts: dict) -> None:
    """Checks that a folder has no texts of another model or command."""
    if not (output / HEADER).exists():
        return
    about = read_header(output)
    if about["base"] != loaded.fingerprint:
        raise UserError(
            f"{output} holds texts of another model: choose another --output."
        )
    for name, value in facts.items():
        recorded = about["facts"].get(name)
        if name == "options" and isinstance(recorded, dict):
            # Earlier versions recorded the batch size, which only affects the speed.
            recorded = {k: v for k, v in recorded.items() if k != "batch_size"}
        # A file with another name may contain the same prompts.
        if name == "prompts_files" or recorded == value:
            continue
        made_with = f"{name} = {recorded}, not {value}"
        if name == "prompts_blake2b":
            made_with = f"other prompts than those of {facts['prompts_files']}"
        raise UserError(
            f"{output} holds texts made with {made_with}: choose another --output, or "
            "the same settings to resume."
        )


def _write_beginning(
    output: pathlib.Path, loaded: LanguageModel, facts: dict, made_up: list[str]
) -> None:
    """Writes all files except the shards; the header, which identifies them, first."""
    base, vocab_size = loaded.fingerprint, loaded.vocab_size
    write_header(output, base=base, vocab_size=vocab_size, facts=facts)
    # Training and counting on the texts need their tokenizer.
    loaded.tokenizer.save(output / TOKENIZER)
    if made_up:
        files.write_json(output / _PROMPTS, made_up, indent=1)


def _made_up(
    output: pathlib.Path,
    loaded: LanguageModel,
    decoder: Decoder,
    options: DecodeOptions,
) -> list[str]:
    """Returns the generated prompts; generates them unless the run already has."""
    chat, path = loaded.chat, output / _PROMPTS
    assert chat is not None
    read = distillation.read_generated_prompts
    texts = hosts.first(lambda: read(path, MADE_UP.value) if path.exists() else None)
    if texts := hosts.agree(texts):
        return texts
    text = distillation.conversation_opening(
        lambda words: chat.render([{"role": "user", "content": words}])
    )
    opening = np.asarray(loaded.tokenizer.encode_chat(text), np.int32)
    sampling = dataclasses.replace(
        options,
        temperature=options.temperature or 1.0,
        # Without a limit, improbable tokens would make prompts nonsensical.
        top_k=options.top_k or _MADE_UP_TOP_K,
        max_new_tokens=MADE_UP_TOKENS.value,
    )
    decoder.check(GREEDY, [opening], sampling)
    # Generated prompts are at least as long as their opening.
    decoder.check(GREEDY, [opening], options)
    with progress.bar(label="making up", total=MADE_UP.value, unit=" prompts") as bar:
        generated = distillation.generate_prompts(
            decoder.task(GREEDY, sampling),
            opening,
            MADE_UP.value,
            options.batch_size,
            bar.update,
        )
    return [loaded.tokenizer.decode(tokens.tolist()) for tokens in generated]


if __name__ == "__main__":
    process_flags.run(main)
