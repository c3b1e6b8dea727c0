"""Damages files of every format; a reader must accept them or raise `UserError`.

    python -m tests.mutations                       # all formats, 2,000 inputs each
    python -m tests.mutations --formats=arpa,gguf --inputs=50 --seed=3
    python -m tests.mutations --table               # the result as Markdown

The formats are those of `tests/mutation_formats.py`. Each is tested in a separate
process, with a limit of memory, and a time limit per input that excludes time in which
the process is suspended. An input passes if its reader returns or raises a `UserError`
without a line break. Anything else is a failure: another exception, a crash, too much
memory or time. The seed and the number of an input determine it. Prints a row per
format and writes one JSON file.
"""

import argparse
import dataclasses
import gzip
import json
import math
import multiprocessing
import os
import pathlib
import platform
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "mutations.json"
INPUTS = 2000
# Beyond the memory of the process before it reads.
MEMORY = 1 << 30
SECONDS = 30

_NUMBERS = (
    *(b"-1", b"0", b"1e400", b"-1e300", b"NaN", b"Infinity", b"99999999999999999999"),
    *(b"2147483648", b"4294967295", b"1" * 5000),
)
_TOKENS = (
    *(b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\t", b" ", b'"', b"'", b"\\"),
    *(b"[" * 100_000, b'{"a":' * 50_000, b"}", b"null", b"[]", b"{}", b"<s>", b"#"),
    *(b"a" * 100_000, b"\\ud800", b"..", b"/", b"%", b"@", b"\\data\\"),
)
_VALUES: tuple[Any, ...] = (
    *(None, [], {}, [1], {"a": 1}, "", "x", "a" * 5000, -1, 0, 1, 3, 2**31, 2**70),
    *(1e300, -0.5, True, False, "\ud800", [[]], [None], math.nan, math.inf),
)
_WORDS = tuple(
    value.to_bytes(size, "little", signed=False)
    for size in (1, 2, 4, 8)
    for value in (0, 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1)
)


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      make: writes a valid example into an empty folder.
      read: reads it from there, as the commands do.
      files: pattern of the files that are damaged.
      reseal: updates the checksums of a damaged folder, as an attacker would;
        None for formats without any.
    """

    make: Callable[[pathlib.Path], object]
    read: Callable[[pathlib.Path], object]
    files: str
    reseal: Callable[[pathlib.Path], object] | None = None


def mutate(data: bytes, rng: random.Random, name: str) -> bytes:
    """Returns a damaged copy; half of the gzip files are damaged before compression."""
    if name.endswith(".gz") and rng.random() < 0.5:
        inner = mutate(gzip.decompress(data), rng, name.removesuffix(".gz"))
        return gzip.compress(inner, 1, mtime=0)
    if name.endswith(".json") and rng.random() < 0.5:
        fields = _change_value(json.loads(data), rng)
        return json.dumps(fields).encode()
    if name.endswith(".jsonl") and rng.random() < 0.5:
        lines = data.splitlines(keepends=True)
        index = rng.randrange(len(lines))
        fields = _change_value(json.loads(lines[index]), rng)
        lines[index] = json.dumps(fields).encode() + b"\n"
        return b"".join(lines)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_DAMAGES)(data, rng)
    return data


def _truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 8)) if data else 0):
        changed[_random_offset(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, rng: random.Random) -> bytes:
    offset, word = _random_offset(data, rng), rng.choice(_WORDS)
    return data[:offset] + word + data[offset + len(word) :]


def _delete(data: bytes, rng: random.Random) -> bytes:
    offset = _random_offset(data, rng)
    return data[:offset] + data[offset + 1 + int(rng.expovariate(0.05)) :]


def _repeat(data: bytes, rng: random.Random) -> bytes:
    offset = _random_offset(data, rng)
    piece = data[offset : offset + 1 + int(rng.expovariate(0.02))]
    return data[:offset] + piece * rng.choice((2, 2, 1000)) + data[offset:]


def _move(data: bytes, rng: random.Random) -> bytes:
    begin, offset = _random_offset(data, rng), _random_offset(data, rng)
    piece = data[begin : begin + 1 + int(rng.expovariate(0.05))]
    return data[:offset] + piece + data[offset:]


def _insert(data: bytes, rng: random.Random) -> bytes:
    offset = _random_offset(data, rng)
    return data[:offset] + rng.choice(_TOKENS) + data[offset:]


def _change_number(data: bytes, rng: random.Random) -> bytes:
    begin = _random_offset(data, rng)
    while begin < len(data) and not data[begin : begin + 1].isdigit():
        begin += 1
    end = begin
    while end < len(data) and data[end : end + 1] in b"0123456789.e":
        end += 1
    return data[:begin] + rng.choice(_NUMBERS) + data[end:]


def _random_offset(data: bytes, rng: random.Random) -> int:
    """A random offset, in half of the cases within the first 256 bytes."""
    size = max(len(data), 1)
    return rng.randrange(min(size, 256) if rng.random() < 0.5 else size)


_DAMAGES = (
    *(_truncate, _flip_bits, _overwrite, _delete),
    *(_repeat, _move, _insert, _change_number),
)


def _change_value(value: Any, rng: random.Random) -> Any:
    """Replaces or removes a part of parsed JSON."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return rng.choice(_VALUES)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if rng.random() < 0.1:
        del changed[key]
    else:
        changed[key] = _change_value(value[key], rng)
    return changed


def damaged(
    example: Format, folder: pathlib.Path, inputs: int, seed: int
) -> Iterator[int]:
    """Damages a file of the folder; yields after each input and restores the file."""
    example.make(folder)
    example.read(folder)
    original = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    targets = sorted(path for path in folder.glob(example.files) if path in original)
    for number in range(inputs):
        rng = random.Random(f"{seed} {number}")
        path = rng.choice(targets)
        path.write_bytes(mutate(original[path], rng, path.name))
        touched = [path]
        if example.reseal is not None and rng.random() < 0.7:
            touched = list(original)
            example.reseal(folder)
        yield number
        for path in touched:
            path.write_bytes(original[path])


class Expired(BaseException):
    """An input takes too long; no reader handles it as an error of the file."""


def attempt(read: Callable[[], object]) -> str | None:
    """Reads; returns None if the input was read, "" if it was refused, or the fault."""
    from bpd_jax.base.errors import UserError

    try:
        read()
        return None
    except UserError as error:
        causes = [error.__cause__, error.__context__]
        for cause in causes:
            if isinstance(cause, MemoryError):
                return f"MemoryError: {error}"[:300]
            if cause is not None:
                causes += [cause.__cause__, cause.__context__]
        return f"lines: {error}" if "\n" in str(error) else ""
    except (Exception, Expired) as error:  # Whatever else it is, it is a fault.
        return f"{type(error).__name__}: {error}"[:300]


def read_damaged(example: Format, inputs: int, seed: int) -> dict[str, Any]:
    """Reads the damaged inputs of one format in this process; returns its row."""
    counts = {"read": 0, "refused": 0}
    failures: list[str] = []
    longest = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch) / "folder"
        folder.mkdir()
        for number in damaged(example, folder, inputs, seed):
            began = time.process_time()
            fault = attempt(lambda: example.read(folder))
            longest = max(longest, time.process_time() - began)
            if fault:
                failures.append(f"input {number}: {fault}")
            else:
                counts["read" if fault is None else "refused"] += 1
    return {
        "inputs": inputs,
        **counts,
        "failures": failures,
        "slowest_cpu_seconds": round(longest, 2),
    }


def run(example: Format, inputs: int, seed: int) -> dict[str, Any]:
    """Tests one format in a child of this process, which has imported the readers."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as output:
        child = context.Process(
            target=_in_child, args=(sender, output.fileno(), example, inputs, seed)
        )
        child.start()
        sender.close()
        try:
            return receiver.recv()
        except EOFError:
            child.join()
            output.seek(0)
            tail = output.read()[-500:].decode(errors="replace")
            fault = f"the process ended with {child.exitcode}: {tail}"
            return {"inputs": inputs, "failures": [fault]}


def _in_child(
    sender: Any, output: int, example: Format, inputs: int, seed: int
) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)

    seconds = 0

    # While the process is suspended, at most one second is counted.
    def tick(*_: object) -> None:
        nonlocal seconds
        seconds += 1
        if seconds >= SECONDS:
            raise Expired(f"longer than {SECONDS} seconds")

    def timed(folder: pathlib.Path) -> None:
        nonlocal seconds
        seconds = 0
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
        try:
            example.read(folder)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    signal.signal(signal.SIGALRM, tick)
    # Compilation and loading at the first use do not count for an input.
    read_damaged(example, 1, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    row = read_damaged(dataclasses.replace(example, read=timed), inputs, seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender.send({**row, "memory_mb": (peak - before) >> 10})


def table(result: dict[str, Any]) -> str:
    """Returns the rows of a result as a Markdown table, for docs/reliability.md."""
    lines = [
        "| format | inputs | read | refused | faults | CPU time | memory |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in sorted(result["formats"].items()):
        numbers = [row["inputs"], row.get("read", 0), row.get("refused", 0)]
        counts = " | ".join(f"{n:,}" for n in [*numbers, len(row["failures"])])
        seconds = row["slowest_cpu_seconds"]
        usage = f"{seconds} s | {row.get('memory_mb', 0)} MB"
        lines.append(f"| `{name}` | {counts} | {usage} |")
    total = sum(row["inputs"] for row in result["formats"].values())
    faults = sum(len(row["failures"]) for row in result["formats"].values())
    lines.append(f"| all | {total:,} | | | {faults} | | |")
    return "\n".join(lines)


def main() -> int:
    """Reads the flags; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="", help="comma-separated; default: all")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default=RESULT, help="file of the results")
    parser.add_argument("--table", action="store_true", help="print the results")
    flags = parser.parse_args()
    if flags.table:
        print(table(json.loads(pathlib.Path(flags.output).read_bytes())))
        return 0
    from bpd_jax.base import provenance
    from bpd_jax.storage import files
    from tests.mutation_formats import FORMATS

    output = pathlib.Path(flags.output)
    # Rows of formats that are not tested now are kept.
    rows = files.read_json(output)["formats"] if output.exists() else {}
    rows = {name: row for name, row in rows.items() if name in FORMATS}
    names = flags.formats.split(",") if flags.formats else list(FORMATS)
    result = {
        "command": "python -m tests.mutations",
        # Not from jax, which starts threads: a process with threads must not fork.
        "device": f"cpu, {os.cpu_count()} cores, {platform.machine()}",
        "versions": provenance.versions(),
        "memory_limit_mb": MEMORY >> 20,
        "seconds_limit": SECONDS,
        "formats": rows,
    }
    for name in names:
        row = run(FORMATS[name], flags.inputs, flags.seed)
        rows[name] = {"date": provenance.today(), "seed": flags.seed, **row}
        facts = ", ".join(f"{k} {v}" for k, v in row.items() if k != "failures")
        print(f"{name:<28} {facts}, failures {len(row['failures'])}", flush=True)
        for failure in row["failures"][:20]:
            print(f"    {failure}", flush=True)
        with files.replacing_file(output) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(any(rows[name]["failures"] for name in names))


if __name__ == "__main__":
    sys.exit(main())
