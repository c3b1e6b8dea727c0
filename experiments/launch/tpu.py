"""Trains on a slice of Cloud TPU VMs, and goes on where Cloud takes the slice back.

    python -m experiments.launch.tpu --name=paper --zone=us-central2-b \\
        --topology=v4:4x4x4 --spot --share=10.0.0.2:/runs --data=gs://BUCKET/c4_rows \\
        --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/v4_128.gin --workdir=blockwise_1b5 --dry_run

Without --dry_run the commands that it prints are run, by a gcloud that is logged in.
Leave it running, in tmux or on a small machine in the same zone. Stopped and started
again it goes on; training that is still at work on the slice is waited for. The slice
is kept at the end: --delete gives it back.

Workers see the share as ../share: a run that training starts from is named as in
--gin.START="'../share/blockwise_1b5'".
"""

import functools
import subprocess
import sys
import time

from absl import flags

from bpd_jax import cli
from bpd_jax.errors import UserError
from experiments.launch.checks import ROOT, check_run, check_travels, git_folder
from experiments.launch.commands import Command, run, train_words
from experiments.launch.tpu_keep import keep_training
from experiments.launch.tpu_slice import SHARE, TpuSlice

NAME = flags.DEFINE_string("name", None, "Name of the slice.")
ZONE = flags.DEFINE_string("zone", None, "Zone, such as us-central2-b.")
PROJECT = flags.DEFINE_string("project", None, "Project; default: gcloud's own.")
TOPOLOGY = flags.DEFINE_string("topology", None, "Chip and sides, such as v4:4x4x4.")
SPOT = flags.DEFINE_bool("spot", False, "A cheaper slice that Cloud may take back.")
SHARED = flags.DEFINE_string(
    "share", None, "Folder that all workers mount, such as 10.0.0.2:/runs."
)
DATA = flags.DEFINE_string(
    "data", None, "Bucket folder of rows that bpd_jax.prepare made, to copy to the run."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, within the share.")
RETRIES = flags.DEFINE_integer(
    "retries", 3, "Restarts, in six hours, after errors on a slice that is still there."
)
REQUESTS = flags.DEFINE_integer(
    "requests", 288, "Requests for another slice, one every --pause, before giving up."
)
PAUSE = flags.DEFINE_float("pause", 300, "Seconds between two attempts.")
DELETE = flags.DEFINE_bool("delete", False, "Give the slice back at the end.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check everything, print, run nothing.")

# Times that a state is asked for before giving up.
_QUESTIONS = 5


def main() -> None:
    """Checks, then runs or prints."""
    tpu = TpuSlice(
        cli.required("name"),
        cli.required("zone"),
        cli.required("topology"),
        cli.required("share"),
        PROJECT.value,
        SPOT.value,
    )
    workdir = cli.required("workdir")
    if workdir.startswith("/") or ".." in workdir.split("/"):
        raise UserError(
            f"--workdir={workdir} must be a folder within the share, such as runs/base."
        )
    gin_files, bindings = flags.FLAGS.gin_file, flags.FLAGS.gin_bindings
    parsed = check_run(gin_files, bindings, tpu.devices)
    _check_start(parsed.value.start)
    words = train_words(
        ".venv/bin/python", gin_files, bindings, f"../{SHARE}/{workdir}"
    )
    # Within git's own folder, where it is no file of the checkout.
    bundle = f"{git_folder()}/bpd_jax_{tpu.name}.bundle"
    pack = Command(
        "pack what is committed",
        ("git", "-C", str(ROOT), "bundle", "create", bundle, "HEAD"),
    )
    commands = tpu.prepare(bundle)
    if DATA.value:
        commands.append(tpu.copy_data(DATA.value, workdir))
    commands.append(tpu.train((*words, "--distributed")))
    if DRY_RUN.value:
        print(*[pack, tpu.create(), *commands], sep="\n\n", end="\n\n")
        print(
            "# if Cloud takes the slice back: this, then all from the second on again"
        )
        print(tpu.delete())
        return
    check_travels(parsed.files)

    # Once: after a restart the run goes on with the source that it began with.
    if run(pack):
        raise UserError(f"could not {pack.about}: see what git printed.")
    keep_training(
        tpu,
        commands,
        run,
        functools.partial(_state, tpu),
        retries=RETRIES.value,
        requests=REQUESTS.value,
        pause=PAUSE.value,
    )
    if DELETE.value:
        run(tpu.delete())


def _check_start(start: str | None) -> None:
    """Raises UserError if a run starts from a folder that the workers cannot see."""
    if start and "/" in start and not start.startswith(f"../{SHARE}/"):
        raise UserError(
            f"TrainConfig.start = {start!r} is no folder of the workers: put it on the "
            f"share and name it as they see it, such as ../{SHARE}/blockwise_1b5."
        )


def _state(tpu: TpuSlice) -> str:
    """The slice's state, "" if there is none.

    Raises:
      UserError: gcloud cannot tell, which is no reason to give the slice up.
    """
    for _ in range(_QUESTIONS):
        found = subprocess.run(
            tpu.describe().words, capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            return found.stdout.strip()
        if "NOT_FOUND" in found.stderr:
            return ""
        print(found.stderr, file=sys.stderr, flush=True)
        time.sleep(PAUSE.value)
    raise UserError(
        f"gcloud cannot tell the state of {tpu.name}: see above; the same command goes "
        "on."
    )


if __name__ == "__main__":
    cli.run(main)
