"""TensorFlow and seqio, imported without their start-up notes and without a GPU.

All files of this package import them from here. TensorFlow only reads and cuts text;
if it used a GPU, it would reserve its memory, which JAX needs.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from bpd_jax.errors import UserError


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discards output on standard error, unless the block fails.

    TensorFlow's libraries write to the file descriptor while they are loaded, before
    any of their settings take effect, so the descriptor itself is redirected.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as swallowed:
        os.dup2(swallowed.fileno(), 2)
        try:
            yield
        except BaseException:
            swallowed.seek(0)
            os.write(saved, swallowed.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
try:
    with _silent_stderr():
        import seqio
        import tensorflow as tf

        # A program that has already used TensorFlow has chosen its own devices.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
except ModuleNotFoundError as error:
    raise UserError(
        f"preparing data needs tensorflow and seqio, and {error.name} is not "
        "installed: prepare the data on a machine that has them, or install them."
    ) from error

__all__ = ["seqio", "tf"]
