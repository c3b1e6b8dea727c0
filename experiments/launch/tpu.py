"""Trains on slices of Cloud TPU VMs; resumes after a preemption.

    python -m experiments.launch.tpu --name=paper --zone=us-central2-b \\
        --topology=v4:4x4x4 --spot --share=10.0.0.2:/runs --data=gs://BUCKET/c4_rows \\
        --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/v4_128.gin --workdir=blockwise_1b5 --dry_run

Without --dry_run the printed commands are run, by a gcloud that is logged in. The run
is independent of this program: it continues when the connection breaks, the terminal
is closed or Ctrl-C ends the launcher, and the same command follows it again. Only a
launcher that is running, in tmux or on a small machine in the same zone, can replace a
preempted slice. --stop saves and ends the run. The slices are kept at the end; --delete
deletes them.

The run's folder may be in a bucket instead (--workdir=gs://BUCKET/RUN), without a
share. The share is mounted as ../share on the workers: the path of a run to start from
is, for example, --gin.START="'../share/blockwise_1b5'".
"""

import functools
import time

from absl import flags

from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from experiments.launch import tpu_flags
from experiments.launch.checks import check_run, check_travels
from experiments.launch.commands import run, train_words
from experiments.launch.tpu_keep import Keeper
from experiments.launch.tpu_state import read_status

DATA = flags.DEFINE_string(
    "data", None, "Bucket folder of rows from bpd_jax.prepare, to copy to the run."
)
WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run, within the share or under gs://."
)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Check everything, print, run nothing.")


def main() -> None:
    """Validates the run, then runs or prints the commands."""
    tpu = tpu_flags.tpu_slice()
    if tpu_flags.STOP.value:
        tpu_flags.stop([tpu], dry_run=DRY_RUN.value)
        return
    workdir = cli.required("workdir")
    folder = tpu.folder("workdir", workdir)
    gin_files, bindings = flags.FLAGS.gin_file, flags.FLAGS.gin_bindings
    parsed = check_run(gin_files, bindings, tpu.devices, tpu.slices)
    tpu_flags.check_start(parsed.value.start)
    words = train_words(".venv/bin/python", gin_files, bindings, folder)
    words = (*words, "--distributed")
    # Only once: a restarted run resumes with the source that it began with.
    bundle, pack = tpu_flags.source_bundle()
    prepare = tpu.prepare(bundle)
    if DATA.value:
        prepare.append(tpu.copy_data(DATA.value, workdir))
    name = time.strftime("%Y%m%d-%H%M%S")
    if DRY_RUN.value:
        attempt = f"{name}-1"
        states = [tpu.describe(), *map(tpu.describe_node, tpu.nodes)]
        shown = [pack, tpu.create(), *states, *prepare]
        shown += [tpu.start(words, attempt, name), tpu.follow(attempt)]
        print(*shown, sep="\n\n", end="\n\n")
        print("# if training fails: this, then everything from sending the source on")
        print(tpu.report(), end="\n\n")
        print("# if slices are preempted: this, then everything from the request on")
        print(tpu.delete())
        return
    check_travels(parsed.files)
    if run(pack):
        raise UserError(f"could not {pack.about}: see git's output above.")
    status = functools.partial(read_status, tpu)
    # A failure of gcloud at the start is an error, since the user is present to fix it;
    # the keeper retries later failures.
    status()
    try:
        patience = tpu_flags.patience()
        keeper = Keeper(tpu, run, status, patience, tpu_flags.DELETE.value)
        keeper.train(prepare, words, name)
    except KeyboardInterrupt:
        progress.say(
            f"# a run on {tpu.name} continues: the same command follows it, --stop "
            "ends it"
        )
        raise


if __name__ == "__main__":
    cli.run(main)
