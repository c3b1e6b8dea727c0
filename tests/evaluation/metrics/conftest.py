"""Real records of the data sets, where they lie beside the repository."""

import gzip
import itertools
import json
import pathlib

import pytest

SAMPLES = pathlib.Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="session")
def records():
    """Reads the first `count` records of `NAME/SPLIT`; skips where they are not."""

    def read(name, count):
        path = SAMPLES / f"{name}.jsonl.gz"
        if not path.is_file():
            pytest.skip("the samples are not here")
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            return [json.loads(line) for line in itertools.islice(lines, count)]

    return read
