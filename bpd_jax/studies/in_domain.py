"""n-gram models of each task's own texts (paper appendix D, Table 7)."""

import json
import pathlib
import tempfile

from bpd_jax import files
from bpd_jax.ngrams.build import Settings, build
from bpd_jax.studies.bench import Bench
from bpd_jax.studies.tasks import rest_of

# The paper adds words that a task never uses as unigrams of this log-probability.
_UNSEEN_LOG_PROB = -1000.0
_ORDER = 2


def build_in_domain(bench: Bench, task: str) -> pathlib.Path:
    """Builds a 2-gram model of texts that are neither reported nor tuned on, once.

    Returns:
      Its folder, `WORKDIR/in_domain/TASK`.
    """
    output = bench.workdir / "in_domain" / task
    facts = {"texts": bench.config.in_domain, "order": _ORDER}
    header = output / "in_domain.json"
    if header.is_file() and json.loads(header.read_text()) == facts:
        return output
    texts = rest_of(bench.sources(task), bench.examples(task), bench.config.in_domain)
    loaded = bench.loaded(task)
    with tempfile.TemporaryDirectory(prefix="bpd_jax") as folder:
        tokens = pathlib.Path(folder) / "tokens.txt"
        with tokens.open("w", encoding="utf-8") as stream:
            for text in texts:
                ids = loaded.tokenizer.encode(text)
                stream.write(" ".join(map(str, ids)) + "\n")
        build(
            Settings(
                output=str(output),
                tokens=str(tokens),
                order=_ORDER,
                vocab_size=loaded.vocab_size,
                end_of_text=loaded.tokenizer.end_of_text,
                unseen_log_prob=_UNSEEN_LOG_PROB,
            )
        )
    with files.replacing_file(header) as temporary:
        temporary.write_text(json.dumps(facts), encoding="utf-8")
    return output
