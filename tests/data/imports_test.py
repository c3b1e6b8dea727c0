"""What must run on hosts that lack the heavy libraries of this room."""

import subprocess
import sys

import pytest

# None in sys.modules makes the import of that name fail.
PROGRAM = """
import sys
for name in {blocked}:
    sys.modules[name] = None
import importlib
importlib.import_module({module!r})
"""

HEAVY = ["tensorflow", "seqio", "tensorflow_datasets", "jax", "flax", "pynini"]


@pytest.mark.parametrize(
    "module",
    [
        "spec",
        "example_spec",
        "readers",
        "corpora",
        "examples",
        "tokenizer",
        "rows",
        "prompts",
        "prepare",
    ],
)
def test_no_heavy_library_is_needed(module):
    name = f"bpd_jax.data.{module}"
    program = PROGRAM.format(blocked=[*HEAVY, "tokenizers"], module=name)
    subprocess.run([sys.executable, "-c", program], check=True)


def test_missing_seqio_is_said_in_one_sentence():
    program = PROGRAM.format(blocked=["seqio"], module="bpd_jax.data.tasks")
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "UserError: preparing data needs tensorflow and seqio" in result.stderr


def test_tensorflow_starts_silently_and_sees_no_gpu():
    program = (
        "from bpd_jax.data.quiet import tf\n"
        "assert tf.config.get_visible_devices('GPU') == []\n"
        "assert list(tf.data.Dataset.range(2).as_numpy_iterator()) == [0, 1]\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("", "")
