"""Packs texts of bpd_jax.distill in a folder that is small enough for a repository.

    python experiments/smollm2/pack_texts.py --output=experiments/smollm2/texts \\
        runs/smollm2/equal/texts/{greedy,plain,sampled}

Training and counting read the packed folder like any other folder of texts.
"""

import lzma
import pathlib
from typing import Any

from bpd_jax.base import cli
from bpd_jax.base.errors import UserError
from bpd_jax.data.generations import open_generations, pack, write_header
from bpd_jax.data.tokenizer import PACKED_NAME, read_tokenizer_file

OUTPUT = cli.DEFINE_path("output", None, "Output folder.")


def main(names: list[str]) -> None:
    """Packs the texts of all folders, in their order."""
    folder = pathlib.Path(cli.required("output"))
    if not names:
        raise UserError("name the folders of texts.")
    parts = [open_generations(name) for name in names]
    first = parts[0]
    for part in parts[1:]:
        if part.base != first.base:
            raise UserError(f"{part.folder} has texts of another model: leave it out.")
    write_header(
        folder,
        base=first.base,
        vocab_size=first.vocab_size,
        facts={part.folder.name: _facts(part.facts) for part in parts},
    )
    _, tokenizer = read_tokenizer_file(first.folder)
    packed = folder / PACKED_NAME
    packed.unlink(missing_ok=True)  # It may be a link to another folder's.
    packed.write_bytes(lzma.compress(tokenizer, preset=9))
    path = pack(parts, folder)
    answers = sum(int((part.lengths - part.prompt_lengths).sum()) for part in parts)
    print(
        f"{sum(map(len, parts)):,} texts, {answers:,} tokens of answers: {path}, "
        f"{path.stat().st_size:,} bytes"
    )


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    """The settings of the texts, with the names of the prompts' files alone."""
    if "prompts_files" not in facts:  # Of each part of a packed folder.
        return facts
    names = [pathlib.Path(name).name for name in facts["prompts_files"]]
    return {**facts, "prompts_files": names}


if __name__ == "__main__":
    cli.run(main, positional=True)
