"""Files of JSON Lines."""

import gzip
import json
import pathlib
from collections.abc import Iterable


def write_json_lines(path: pathlib.Path, records: Iterable[object]) -> pathlib.Path:
    """Writes one record per line, compressed if the name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
