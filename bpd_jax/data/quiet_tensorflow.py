"""TensorFlow and seqio, imported without their start-up notes and without a GPU.

Every file of this room that needs them takes them from here. TensorFlow only reads
and cuts text for us; a GPU it touched would be lost to JAX.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from bpd_jax.errors import UserError


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Swallows what is written to standard error, unless the block fails.

    TensorFlow's libraries write while they are loaded, below Python and before any
    setting of theirs is read; so the file descriptor itself is turned away.
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

        # A program that ran TensorFlow before us has made its own choice.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
except ModuleNotFoundError as error:
    raise UserError(
        f"preparing data needs tensorflow and seqio, and {error.name} is not "
        "installed: prepare the data where they are, or install them here."
    ) from error

__all__ = ["seqio", "tf"]
