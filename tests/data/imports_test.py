"""Modules that must be importable on hosts without heavy libraries."""

from tests.commands import python

HEAVY = ["tensorflow", "seqio", "tensorflow_datasets", "jax", "flax", "pynini"]


def run(program, blocked=()):
    """Output and errors of a program that cannot import some libraries."""
    # None in sys.modules makes the import of that name fail.
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    result = python("-c", block + program)
    return result.stdout, result.stderr


def test_rows_of_text_are_made_without_heavy_libraries(tmp_path):
    (tmp_path / "a.txt").write_text("To be or not to be.")
    (tmp_path / "b.txt").write_text("That is the question.")
    program = (
        "from bpd_jax.data.row_preparation import prepare_rows\n"
        "from bpd_jax.data.text_task import TextTask\n"
        f"task = TextTask('text_files', '{tmp_path}/*.txt')\n"
        f"print(prepare_rows(task, 'all', 8, '{tmp_path}/rows').num_tokens)"
    )
    # 7 and 5 tokens of GPT-3, each between two end-of-text tokens.
    assert run(program, HEAVY)[0] == "16\n"


def test_missing_seqio_is_reported_in_one_sentence():
    _, errors = run("import bpd_jax.data.seqio_tasks", ["tensorflow", "seqio"])
    assert "UserError: preparing data needs tensorflow and seqio" in errors


def test_tensorflow_starts_silently_and_without_gpu():
    program = (
        "from bpd_jax.data.quiet_tensorflow import tf\n"
        "print(tf.config.get_visible_devices('GPU'))\n"
        "print(list(tf.data.Dataset.range(2).as_numpy_iterator()) == [0, 1])\n"
    )
    assert run(program) == ("[]\nTrue\n", "")
