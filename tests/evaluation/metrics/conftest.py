"""Real records of the data sets, if they are available."""

import gzip
import itertools
import json
import pathlib

import pytest

SAMPLES = pathlib.Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="session")
def records():
    """Reads the first `count` records of `NAME/SPLIT`; skips the test without them."""

    def read(name, count):
        path = SAMPLES / f"{name}.jsonl.gz"
        if not path.is_file():
            pytest.skip("the samples are not here")
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            return [json.loads(line) for line in itertools.islice(lines, count)]

    return read
