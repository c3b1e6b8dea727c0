"""Imports TensorFlow and seqio without their start-up messages and without a GPU.

All modules of this package import them from here. TensorFlow only processes text; on a
GPU it would reserve the memory that JAX needs.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from bpd_jax.base.errors import UserError


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards output on standard error, unless the block fails.

    TensorFlow's libraries write to the file descriptor while they are loaded, before
    their settings take effect, so the file descriptor is redirected.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(saved, captured.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
try:
    with _silent_stderr():
        import seqio
        import tensorflow as tf

        # Fails if the program has already initialized TensorFlow's devices.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
except ModuleNotFoundError as error:
    raise UserError(
        f"preparing data needs tensorflow and seqio, and {error.name} is not "
        "installed: pip install 'bpd_jax[data]', or prepare the data on a machine "
        "that has them."
    ) from error

__all__ = ["seqio", "tf"]
