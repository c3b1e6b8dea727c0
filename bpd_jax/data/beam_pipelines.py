"""Apache Beam pipelines of the commands: their options, and errors of workers.

Beam is imported in functions, so that commands which only may use it do not need it.
"""

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bpd_jax.base.errors import UserError

if TYPE_CHECKING:
    import apache_beam

# Runners whose job server accepts further options, which Beam cannot check.
_WITH_JOB_SERVER = ("PortableRunner", "FlinkRunner", "SparkRunner")


def make_pipeline(options: Sequence[str]) -> "apache_beam.Pipeline":
    """Returns an empty pipeline.

    Args:
      options: options of Beam, as on a command line, such as `--runner=DirectRunner`.
    """
    try:
        import apache_beam as beam
        from apache_beam.options import pipeline_options
    except ModuleNotFoundError as error:
        raise UserError(
            f"a Beam pipeline needs apache-beam, and {error.name} is not installed: "
            "pip install apache-beam."
        ) from error

    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            parsed = pipeline_options.PipelineOptions(list(options))
            known = parsed.get_all_options()
            passed = parsed.get_all_options(retain_unknown_options=True)
            pipeline = beam.Pipeline(options=parsed)
    except SystemExit as error:  # argparse has printed its usage and the reason.
        reason = usage.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"Beam does not accept these options: {reason}.") from error
    except ValueError as error:
        raise UserError(f"Beam does not accept these options: {error}") from error
    unknown = [f"--{name}" for name in passed if name not in known]
    runner = parsed.view_as(pipeline_options.StandardOptions).runner or ""
    if unknown and not runner.endswith(_WITH_JOB_SERVER):
        raise UserError(f"Beam has no option {' and '.join(unknown)}.")
    return pipeline


@contextlib.contextmanager
def worker_errors(
    output: str | os.PathLike[str], *library_errors: type[Exception]
) -> Iterator[None]:
    """Converts errors of workers and of the file system into a `UserError`.

    Args:
      output: the result of the pipeline, which the message names if writing fails.
      *library_errors: exceptions of other libraries that may contain the text of a
        worker's `UserError`, as Beam's RuntimeError does.
    """
    of_workers: tuple[type[Exception], ...] = (RuntimeError, *library_errors)
    try:
        yield
    except UserError as error:  # Raised in this process, perhaps by a worker's thread.
        raise UserError(str(error).partition(" [while running ")[0]) from error
    except of_workers as error:
        match = re.search(r"UserError: (.*?)( \[while running .*)?$", str(error), re.M)
        if match is None:
            raise
        raise UserError(match[1]) from error
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error
