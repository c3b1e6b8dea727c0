import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.data.text_task import TextTask

GENERATIONS = {"corpus": "generations", "text_files": "texts"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"corpus": "text_files"}, "needs text_files"),
        ({"text_files": "a.txt"}, "set corpus to 'text_files'"),
        ({"corpus": "generations"}, "generations needs text_files"),
        ({**GENERATIONS, "vocabulary": "bpe:300"}, "are token ids"),
        ({**GENERATIONS, "max_bytes": 9}, "are token ids"),
        ({"vocabulary": "bpe:256"}, "at least 257"),
        ({"vocabulary": "bpe:many"}, "at least 257"),
        ({"validation_fraction": 1.0}, "above 0 and below 1"),
    ],
)
def test_error_names_the_invalid_field(fields, message):
    with pytest.raises(UserError, match=message):
        TextTask(**fields)


@pytest.mark.parametrize(
    "vocabulary, name",
    [
        ("gpt3", "stdlib.gpt3"),
        ("bpe:2048", "stdlib.bpe:2048"),
        ("run/tokenizer.json", "stdlib.custom"),
    ],
)
def test_names_of_seqio_tasks(vocabulary, name):
    assert TextTask(vocabulary=vocabulary).name == name


def test_unknown_splits_are_refused():
    with pytest.raises(UserError, match="unknown split 'test'"):
        TextTask().check_split("test")
