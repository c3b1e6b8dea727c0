"""Compiles a program for a slice; what the compiler says of it, and the least time."""

import collections
import re
import time
from typing import Any

import jax

from bpd_jax.base.errors import UserError
from bpd_jax.compilation.programs import Program
from bpd_jax.compilation.topology import COMPILER_OPTIONS, Slice
from bpd_jax.storage.files import write_text
from bpd_jax.storage.paths import as_path


def compile_for(
    program: Program, accelerators: Slice, folder: str | None = None
) -> dict[str, Any]:
    """Compiles a program; one that does not fit the memory is a `UserError`.

    Its compiled text is written to `folder/NAME.txt`, if there is a folder.

    Returns:
      Figures of one core or GPU and one run, for JSON. `memory_per_core` is in bytes,
      by the compiler's own analysis: `arguments`, with donated ones; `outputs`, with
      those in donated memory; `donated`, the outputs that reuse the memory of
      arguments; `temporaries`; `code`; `needed`, the total; and `usable` of the core.
      `minimum_seconds` is a lower bound of the time: that of the model's FLOPs at the
      chip's peak, and that of reading parameters and cache once.
    """
    start, chip = time.perf_counter(), accelerators.chip
    lowered = program.lower()
    try:
        compiled = lowered.compile(COMPILER_OPTIONS if chip.gpu else None)
    except jax.errors.JaxRuntimeError as error:
        if not _OUT_OF_MEMORY.match(str(error)):
            raise
        reason = str(error).partition("\n")[0].partition(": ")[2].rstrip(".")
        raise _refusal(program, accelerators, reason) from error
    seconds = time.perf_counter() - start
    text, analysis = compiled.as_text() or "", compiled.memory_analysis()
    assert analysis is not None
    if folder is not None:
        write_text(as_path(folder) / f"{program.name}.txt", text)
    memory = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "donated": analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }
    needed = sum(memory.values()) - 2 * memory["donated"]
    if chip.gpu and needed > chip.usable:
        # The GPU compiler does not refuse such a program.
        reason = f"it needs {needed / 2**30:.2f} of {chip.usable / 2**30:.2f} GiB"
        raise _refusal(program, accelerators, reason)
    flops = program.model_flops / program.mesh.size
    return {
        "about": program.about,
        "mesh": dict(program.mesh.shape),
        "compile_seconds": round(seconds, 1),
        "memory_per_core": {**memory, "needed": needed, "usable": chip.usable},
        "collectives": count_collectives(text),
        "model_flops_per_core": flops,
        "read_bytes_per_core": program.reads,
        "minimum_seconds": {
            "compute": flops / (chip.flops / chip.cores),
            "reading": program.reads / (chip.hbm / chip.cores),
        },
    }


_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|"
    r"collective-permute|collective-broadcast)(?:-start)?\((.*)"
)


def count_collectives(text: str) -> dict[str, int]:
    """Collectives in a compiled program's text; the body of a loop counts once.

    The TPU compiler repeats a collective, with its channel, in every fusion that it
    overlaps with it.

    >>> count_collectives('''
    ...   %a = f32[8]{0} all-gather(%p), channel_id=3, dimensions={0}
    ...   %b = (f32[4], f32[4]) all-reduce-start(%a, %p), channel_id=4
    ...   %c = f32[8]{0} all-gather(%q), channel_id=3, dimensions={0}
    ... ''')
    {'all-gather': 1, 'all-reduce': 1}
    """
    found = {
        (kind, channel[0] if (channel := re.search(r"channel_id=\d+", rest)) else n)
        for n, (kind, rest) in enumerate(_COLLECTIVE.findall(text))
    }
    return dict(sorted(collections.Counter(kind for kind, _ in found).items()))


# The TPU compiler's refusal, of a program whose arguments or temporaries do not fit.
_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED: .*(memory space hbm|available HBM)")


def _refusal(program: Program, accelerators: Slice, reason: str) -> UserError:
    return UserError(
        f"the {program.name} step does not fit on {accelerators.name}: {reason}; shard "
        "the parameters over more devices (MeshConfig.fsdp, model), store fewer "
        "activations (ComputeConfig.remat, loss_chunk) or split the batch "
        "(ComputeConfig.accumulate)."
    )
