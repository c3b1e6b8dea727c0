"""Modules that must be importable on hosts without heavy libraries."""

import subprocess
import sys

# None in sys.modules makes the import of that name fail.
PROGRAM = """
import sys
for name in {blocked}:
    sys.modules[name] = None
import importlib
for name in {modules}:
    importlib.import_module(name)
"""

HEAVY = ["tensorflow", "seqio", "tensorflow_datasets", "jax", "flax", "pynini"]


def test_modules_import_without_heavy_libraries():
    modules = [
        "bpd_jax.data.text_task",
        "bpd_jax.data.example_task",
        "bpd_jax.data.text_readers",
        "bpd_jax.data.corpora",
        "bpd_jax.data.example_readers",
        "bpd_jax.data.tokenizer",
        "bpd_jax.data.task_tokenizer",
        "bpd_jax.data.rows",
        "bpd_jax.data.prompts",
        "bpd_jax.data.row_preparation",
    ]
    program = PROGRAM.format(blocked=HEAVY, modules=modules)
    subprocess.run([sys.executable, "-c", program], check=True)


def test_missing_seqio_is_reported_in_one_sentence():
    program = PROGRAM.format(blocked=["seqio"], modules=["bpd_jax.data.seqio_tasks"])
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "UserError: preparing data needs tensorflow and seqio" in result.stderr


def test_tensorflow_starts_silently_and_without_gpu():
    program = (
        "from bpd_jax.data.quiet_tensorflow import tf\n"
        "assert tf.config.get_visible_devices('GPU') == []\n"
        "assert list(tf.data.Dataset.range(2).as_numpy_iterator()) == [0, 1]\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("", "")
