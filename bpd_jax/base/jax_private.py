"""Names of jax that are not part of its interface: all that this project uses.

They may change with any version. `tests/base/jax_private_test.py` names the versions
with which they have been tested.
"""

from typing import Any

import jax
from jax._src.config import trace_context as trace_context
from jax._src.distributed import global_state
from jaxlib.mlir.passmanager import PassManager


def process_count() -> int:
    """The number of processes that have joined; 1 before any has."""
    return int(global_state.num_processes or 1)


def process_id() -> int:
    """The number of this process, by which process 0 prints and writes files.

    On Cloud TPU `jax.process_index()` may count in another order.
    """
    return int(global_state.process_id)


def start_preemption_service() -> None:
    """Lets processes agree on a step after one of them has received SIGTERM."""
    if global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        global_state.initialize_preemption_sync_manager()


def strip_source_lines(lowered: Any) -> None:
    """Removes names of source lines, a third of the text of a lowered program."""
    module = lowered.compiler_ir()
    with module.context:
        PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
