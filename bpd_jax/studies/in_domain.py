"""In-domain texts of each task, and n-gram models of them (appendix D, Table 7)."""

import hashlib
import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

from bpd_jax import files
from bpd_jax.buckets import as_path
from bpd_jax.errors import UserError
from bpd_jax.ngrams.build_model import Settings, build
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

    Raises:
      UserError: no text is left.
    """
    output = context.workdir / "in_domain" / task
    loaded = context.loaded(task)
    sources: Iterable[TaskRecord] = context.sources(task)
    data = as_path(context.config.data or "")
    if has_train(data, task):
        # The training split may be large, and only its first records are needed.
        sources = itertools.chain(read_sources(data, task, [_TRAIN]), sources)
    texts = undrawn_texts(sources, context.whole_draw(task), context.config.in_domain)
    if not texts:
        raise UserError(
            f"{task} has no text left for in-domain n-grams: add a split {_TRAIN}, or "
            "report on fewer examples."
        )
    _write_texts(context.workdir / "in_domain_texts" / f"{task}.jsonl", texts)
    tokens = [loaded.tokenizer.encode(text) for text in texts]
    digest = hashlib.sha256(json.dumps([tokens, _ORDER]).encode()).hexdigest()
    facts = {"texts": len(texts), "digest": digest}
    header = output / "in_domain.json"
    if _contains(header, json.dumps(facts)):
        return facts
    with tempfile.TemporaryDirectory(prefix="bpd_jax") as folder:
        path = as_path(folder) / "tokens.txt"
        lines = [" ".join(map(str, ids)) + "\n" for ids in tokens]
        path.write_text("".join(lines), encoding="utf-8")
        build(
            Settings(
                output=str(output),
                tokens=str(path),
                order=_ORDER,
                vocab_size=loaded.vocab_size,
                end_of_text=loaded.tokenizer.end_of_text,
                unseen_log_prob=_UNSEEN_LOG_PROB,
            )
        )
    with files.replacing_file(header) as temporary:
        temporary.write_text(json.dumps(facts), encoding="utf-8")
    return facts


def _contains(path: pathlib.Path, content: str) -> bool:
    """Whether a file has this content; a damaged file has not, and is replaced."""
    wanted = content.encode("utf-8")
    # The size is compared first, so that no more is read than is in memory already.
    return (
        path.is_file()
        and path.stat().st_size == len(wanted)
        and path.read_bytes() == wanted
    )


def _write_texts(path: pathlib.Path, texts: Sequence[str]) -> None:
    """Writes texts as JSON Lines, unless the file is up to date."""
    content = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    if _contains(path, content):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing_file(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
