"""Runs EleutherAI's Evaluation Harness with the model type `bpd_jax`.

    python -m bpd_jax.lm_eval --model bpd_jax \\
        --model_args model=demo,method=ngram:16 --tasks lambada_openai

All other options are those of the harness's own command, `lm_eval`. `--model_args` are
the arguments of `bpd_jax.evaluation.lm_eval_model.HarnessModel`. A mesh is set as in
other commands, with `--gin_file=…` or `--gin.MeshConfig.model=4`, and several processes
join with the same flags.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags

from bpd_jax.base import cli, configuration, startup
from bpd_jax.base.compiled import keep_compiled
from bpd_jax.base.errors import UserError
from bpd_jax.evaluation.lm_eval_model import HarnessModel
from bpd_jax.models.mesh import MeshConfig
from bpd_jax.training import hosts, process_flags

# Beginnings of the flags that are not the harness's.
_OWN = ("gin", "coordinator", "num_proc", "process_id", "heartbeat", "distributed")


def register(mesh: MeshConfig | None = None) -> type[HarnessModel]:
    """Registers the model type `bpd_jax` with the harness in this process.

    The mesh has the devices that decode; None for the first one.
    """
    try:
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
        from lm_eval.utils import simple_parse_args_string
    except ImportError as error:
        raise UserError(
            f"the Evaluation Harness cannot be imported ({error}): pip install "
            "'lm_eval>=0.4.13,<0.5'."
        ) from error

    class HarnessLM(HarnessModel, LM):
        """A `HarnessModel` in the harness's own class hierarchy."""

        @classmethod
        def create_from_arg_obj(
            cls,
            arg_dict: Mapping[str, Any],
            additional_config: Mapping[str, Any] | None = None,
        ) -> "HarnessLM":
            """Creates a model from `--model_args`, and `--batch_size` as a default.

            The device that the harness passes, `cuda:0` by default, is ignored, because
            jax chooses the device.
            """
            flags = additional_config or {}
            defaults = {"batch_size": flags.get("batch_size") or 1, "mesh": mesh}
            return cls(**{**defaults, **arg_dict})

        @classmethod
        def create_from_arg_string(
            cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
        ) -> "HarnessLM":
            """The same for arguments of the form `NAME=VALUE,NAME=VALUE`."""
            arguments = simple_parse_args_string(arg_string)
            return cls.create_from_arg_obj(arguments, additional_config)

        def keep(self, kind: str, arguments: tuple[Any, ...], answer: object) -> None:
            """Writes an answer to the file of `--use_cache`, if there is one."""
            self.cache_hook.add_partial(kind, arguments, answer)

    return register_model("bpd_jax")(HarnessLM)


def _parse_own_arguments() -> None:
    """Takes the arguments about gin and processes out of the command line."""
    names = tuple(f"--{name}" for name in _OWN)
    own = [each for each in sys.argv[1:] if each.startswith(names)]
    sys.argv[1:] = [each for each in sys.argv[1:] if each not in own]
    flags.FLAGS([sys.argv[0], *cli.rewrite_gin_arguments(own)])


def _mesh() -> MeshConfig | None:
    hosts.check_joined()
    defaults = ["MeshConfig.data = -1"]
    parsed = configuration.parse_flags(MeshConfig, defaults=defaults)
    return parsed.value if hosts.count() > 1 or parsed.settings else None


def _share_work() -> None:
    """Lets process 0 alone write, and refuses what the others would do differently."""
    if hosts.count() > 1 and any(x.startswith("--use_cache") for x in sys.argv):
        raise UserError("--use_cache is for one process: leave it out.")
    if hosts.is_first():
        return
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        if word in ("--output_path", "-o"):
            next(words, None)
        elif not word.startswith(("--output_path=", "--log_samples", "-s")):
            kept.append(word)
    sys.argv[1:] = kept


def main() -> None:
    """Runs the harness's own command."""
    # Its statistics would fork a process with jax's threads, which may deadlock.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with cli.exit_on_errors():
        _parse_own_arguments()
        with process_flags.joining():
            _run()


def _run() -> None:
    register(_mesh())
    _share_work()
    from lm_eval.__main__ import cli_evaluate

    keep_compiled()
    try:
        # Its progress bars move the cursor.
        with contextlib.redirect_stderr(startup.unguarded(sys.stderr)):
            cli_evaluate()
    except RuntimeError as error:
        # Of the package datasets, which runs no code of a dataset any more.
        if "Dataset scripts" not in str(error):
            raise
        raise UserError(
            f"a task's dataset is a program, which is not run ({error}): choose a task "
            "whose dataset consists of files."
        ) from error


if __name__ == "__main__":
    main()
