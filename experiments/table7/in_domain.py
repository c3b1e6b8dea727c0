"""In-domain texts of each task, and n-gram models of them (appendix D, Table 7)."""

import filecmp
import hashlib
import itertools
import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from bpd_jax.base.errors import UserError
from bpd_jax.ngrams.build_model import build
from bpd_jax.ngrams.build_settings import BuildSettings
from bpd_jax.storage import files
from bpd_jax.storage.paths import as_path, local_copy
from bpd_jax.studies.study_context import StudyContext
from bpd_jax.studies.tasks import TaskRecord, has_train, read_sources, undrawn_texts

# Log-probability of unigrams that do not occur in a task's texts, as in the paper.
_UNSEEN_LOG_PROB = -1000.0
_ORDER = 2
_TRAIN = "train"


def build_in_domain(context: StudyContext, task: str) -> dict[str, Any]:
    """Builds a 2-gram model of texts that are neither reported nor tuned on.

    The texts come from the task's training split, if there is one, and then from the
    examples of the reported split that no shard has drawn. The model is stored in
    `WORKDIR/in_domain/TASK` and is not built again if it is up to date. The texts are
    stored in `WORKDIR/in_domain_texts/TASK.jsonl`; a rescorer can be trained on them.

    Returns:
      `texts`, the number of texts, and `digest` of everything that the model depends
      on.
    """
    output = context.workdir / "in_domain" / task
    loaded = context.loaded(task)
    sources: Iterable[TaskRecord] = context.sources(task)
    data = as_path(context.config.data or "")
    if has_train(data, task):
        # The training split may be larger than memory: one record is kept at a time.
        training = read_sources(data, task, [_TRAIN], kept=False)
        sources = itertools.chain(training, sources)
    texts = undrawn_texts(sources, context.whole_draw(task), context.config.in_domain)
    context.workdir.mkdir(parents=True, exist_ok=True)
    # On the disk of the results, because the texts of a task can take gigabytes.
    with tempfile.TemporaryDirectory(prefix=".bpd_jax", dir=context.workdir) as folder:
        lines, tokens = as_path(folder) / "texts.jsonl", as_path(folder) / "tokens.txt"
        facts = _write(texts, loaded.tokenizer.encode, lines, tokens)
        if not facts["texts"]:
            raise UserError(
                f"{task} has no text left for in-domain n-grams: add a split {_TRAIN}, "
                "or report on fewer examples."
            )
        _copy(lines, context.workdir / "in_domain_texts" / f"{task}.jsonl")
        header = output / "in_domain.json"
        if header.is_file() and header.read_bytes() == json.dumps(facts).encode():
            return facts
        build(
            BuildSettings(
                output=str(output),
                tokens=str(tokens),
                order=_ORDER,
                vocab_size=loaded.vocab_size,
                end_of_text=loaded.tokenizer.end_of_text,
                unseen_log_prob=_UNSEEN_LOG_PROB,
            )
        )
    files.write_text(header, json.dumps(facts))
    return facts


def _write(
    texts: Iterable[str],
    encode: Callable[[str], list[int]],
    lines: pathlib.Path,
    tokens: pathlib.Path,
) -> dict[str, Any]:
    """Writes texts as JSON Lines, and their tokens, keeping one text in memory.

    Returns:
      See `build_in_domain`.
    """
    count = 0
    # Of the JSON text of [the tokens of each text, the order].
    digest = hashlib.sha256(b"[[")
    with (
        lines.open("w", encoding="utf-8") as lines_stream,
        tokens.open("w", encoding="utf-8") as tokens_stream,
    ):
        for count, text in enumerate(texts, start=1):
            ids = encode(text)
            lines_stream.write(json.dumps({"text": text}) + "\n")
            tokens_stream.write(" ".join(map(str, ids)) + "\n")
            digest.update(f"{', ' * (count > 1)}{json.dumps(ids)}".encode())
    digest.update(f"], {_ORDER}]".encode())
    return {"texts": count, "digest": digest.hexdigest()}


def _copy(source: pathlib.Path, path: pathlib.Path) -> None:
    """Copies a file, unless the copy is up to date."""
    source = local_copy(source)
    if path.is_file() and filecmp.cmp(source, local_copy(path), shallow=False):
        return
    with files.replacing_file(path) as temporary:
        shutil.copyfile(source, temporary)
