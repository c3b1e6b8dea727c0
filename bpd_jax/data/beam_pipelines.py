"""Apache Beam pipelines of the commands: their options, and errors of workers.

Beam is imported in functions, so that commands which only may use it do not need it.
"""

import contextlib
import importlib
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
# Beam knows neither the short name of this runner nor, before its module is imported,
# its options.
_DASK = "DaskRunner"
_DASK_MODULE = "apache_beam.runners.dask.dask_runner"


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

    options = _complete_dask_options(options)
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


def _complete_dask_options(options: Sequence[str]) -> list[str]:
    """Adds defaults to the options of a pipeline on Dask; returns others unchanged.

    The runner's default gives 128 files to one task. Here each file is a task, so that
    all workers take part and a killed worker loses one file at most.
    """
    names = [f"--runner={_DASK}", f"--runner={_DASK_MODULE}.{_DASK}"]
    if not set(names) & set(options):
        return list(options)
    try:
        importlib.import_module(_DASK_MODULE)
    except ImportError as error:
        raise UserError(
            f"{_DASK} needs the packages dask and distributed ({error}): install "
            "bpd_jax with the extra dask."
        ) from error
    others = [option for option in options if option not in names]
    sizes = ("--dask_npartitions", "--dask_partition_size")
    if not any(size in option for option in others for size in sizes):
        others.append("--dask_partition_size=1")
    return [names[1], *others]


@contextlib.contextmanager
def running(pipeline: "apache_beam.Pipeline") -> Iterator[None]:
    """Runs the transforms that the block adds, then disconnects from a cluster."""
    try:
        with pipeline:
            yield
    except Exception as error:
        reason = str(error).partition("\n")[0]
        of_dask = type(error).__module__.startswith("distributed.")
        if not of_dask and "trying to connect to" not in reason:
            raise
        raise UserError(f"the Dask cluster failed: {reason}") from error
    finally:
        # A pipeline that failed before it ran has no result.
        client = getattr(getattr(pipeline, "result", None), "client", None)
        if client is not None:
            client.close()


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
