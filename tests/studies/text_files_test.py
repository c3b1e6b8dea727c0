"""Files of a study: recorded texts, weights and in-domain texts."""

import hashlib
import json

import numpy as np
import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.decoding.recording import RecordedText
from bpd_jax.studies import tuning
from bpd_jax.studies.text_files import load_texts, save_texts
from experiments.table7 import in_domain


def recorded(size):
    return RecordedText(
        input_ids=np.arange(4, dtype=np.int32),
        output_ids=np.arange(size, dtype=np.int32),
        candidates=np.zeros((size, 2, 3), np.int32),
        log_probs=np.full((size, 2, 3), -np.inf, np.float32),
        entropies=np.ones((size, 3), np.float32),
    )


def test_recorded_texts_are_read(tmp_path):
    path = tmp_path / "texts.npz"
    assert load_texts(path, "abc") is None
    save_texts(path, "abc", [recorded(3), recorded(5)])
    assert load_texts(path, "other") is None
    first, second = load_texts(path, "abc")
    assert (len(first.output_ids), len(second.output_ids)) == (3, 5)
    np.testing.assert_array_equal(second.candidates, recorded(5).candidates)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "texts.npz"
    np.savez(path, digest="abc")
    with pytest.raises(UserError, match=r"cannot read .*texts\.npz .*: remove it"):
        load_texts(path, "abc")
    path = tmp_path / "alpha.json"
    path.write_text(json.dumps({"alpha": 0.5, "zero_wins": True}))
    assert tuning._read(path) == (0.5, True)
    path.write_text("{}")
    with pytest.raises(UserError, match="remove it"):
        tuning._read(path)


def test_damaged_in_domain_texts_are_written_again(tmp_path):
    source, path = tmp_path / "source", tmp_path / "texts" / "squad.jsonl"
    intact = b'{"text": "b"}\n'
    source.write_bytes(intact)
    in_domain._copy(source, path)
    time = path.stat().st_mtime_ns
    in_domain._copy(source, path)
    assert path.stat().st_mtime_ns == time
    path.write_bytes(b"\xff" * len(intact))
    in_domain._copy(source, path)
    assert path.read_bytes() == intact


@pytest.mark.parametrize("texts", [[], ["ä"], ["ä\n", "", "c d"]])
def test_in_domain_texts_are_written_one_by_one(tmp_path, texts):
    """The digest is that of all tokens at once."""
    lines, tokens = tmp_path / "texts.jsonl", tmp_path / "tokens.txt"
    facts = in_domain._write(iter(texts), lambda text: [*text.encode()], lines, tokens)
    ids = [[*text.encode()] for text in texts]
    digest = hashlib.sha256(json.dumps([ids, 2]).encode()).hexdigest()
    assert facts == {"texts": len(texts), "digest": digest}
    written = lines.read_text().splitlines()
    assert [json.loads(line)["text"] for line in written] == texts
    assert [[*map(int, line.split())] for line in tokens.open()] == ids
