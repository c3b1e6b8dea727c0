"""Runs any command on slices of Cloud TPU VMs; resumes training after a preemption.

    python -m experiments.launch.tpu --name=paper --zone=us-central2-b \\
        --topology=v4:4x4x4 --gcloud=--spot --share=10.0.0.2:/runs \\
        --data=gs://BUCKET/c4_rows --dry_run \\
        -- train --gin_file=gin_configs/runs/pretrain.gin \\
        --gin_file=gin_configs/meshes/v4_128.gin --workdir=../share/blockwise_1b5

Without --dry_run the printed commands are run, by a gcloud that is logged in. The
command after -- is run on every worker, in the checkout; the share is ../share there,
and other folders are in a bucket (gs://). The run is independent of this program: it
continues when the connection breaks, the terminal is closed or Ctrl-C ends the
launcher, and the same command follows it again. Only a launcher that is running can
replace a preempted slice. --stop saves and ends the run, --delete deletes the slices.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence

from absl import flags

from bpd_jax.base import cli, progress
from bpd_jax.base.errors import UserError
from experiments.launch import command
from experiments.launch.command import SHARED, Command, Program, run
from experiments.launch.dry_run import DRY_RUN
from experiments.launch.tpu_keep import READY, Keeper, RunFailedError, read_state
from experiments.launch.tpu_slice import TpuSlice

flags.DEFINE_string("name", None, "Name of the request for slices.")
cli.define_flags(TpuSlice, "zone", "topology", "share", "slices", "gcloud", "ssh")
flags.DEFINE_integer("retries", 3, "Failed attempts that are retried.")
flags.DEFINE_float("pause", 300, "Seconds between two attempts.")
cli.DEFINE_path(
    "data", None, "Bucket folder of prepared rows, to copy to WORKDIR/data."
)
flags.DEFINE_bool("stop", False, "Save and end the runs in progress, nothing else.")
flags.DEFINE_bool("delete", False, "Delete the slices at the end.")


def requested(count: int = 1) -> list[TpuSlice]:
    """The slices that the flags request; of several requests NAME-0, NAME-1, …."""
    given = {name: cli.required(name) for name in ("name", "zone", "topology")}
    fields = {**cli.flag_values(TpuSlice), **given}
    names = [f"{given['name']}-{i}" for i in range(count)] if count > 1 else []
    return [TpuSlice(**{**fields, "name": x}) for x in names or [given["name"]]]


def stop(tpus: Sequence[TpuSlice]) -> None:
    """Saves and ends the runs on slices."""
    if DRY_RUN.value:
        print(*(tpu.stop() for tpu in tpus), sep="\n\n")
        return
    states = {tpu.name: read_state(tpu) for tpu in tpus}
    for tpu in tpus:
        condition, detail = states[tpu.name]
        if condition != READY:
            progress.say(f"# {detail}: nothing was stopped")
        elif run(tpu.stop()):
            raise UserError(f"could not stop {tpu.name}: see gcloud's output.")


def launch(programs: Mapping[str, Program], tpus: Sequence[TpuSlice]) -> None:
    """Runs commands, by name, on slices of one size: an idle slice takes the next.

    A dry run prints the commands of gcloud.
    """
    first, stamp = tpus[0], time.strftime("%Y%m%d-%H%M%S")
    alone = f"give --slices=1 and a topology of one host, as {first.one_host}"
    size = (first.devices, first.slices, first.hosts, alone)
    files: set[str] = set()
    there = {}
    for name, program in programs.items():
        files.update(command.check(program, *size, first.check_folder))
        there[name] = program
        # The processes find each other.
        if program.module in SHARED and "--distributed" not in program.arguments:
            arguments = (*program.arguments, "--distributed")
            there[name] = dataclasses.replace(program, arguments=arguments)
    folder = command.git("rev-parse", "--absolute-git-dir")
    bundle = f"{folder}/bpd_jax_{first.name}.bundle"
    words = ("git", "-C", str(command.ROOT), "bundle", "create", bundle, "HEAD")
    pack = Command("pack the committed files", words)
    if DRY_RUN.value:
        shown: list[Command | str] = [pack, *(tpu.create() for tpu in tpus)]
        shown += [first.describe(), *map(first.describe_node, first.nodes)]
        shown += first.prepare(bundle)
        for program in there.values():
            shown += first.copy_rows(program, flags.FLAGS.data)
            shown += [first.start(program, stamp), first.follow()]
        if flags.FLAGS.delete:
            shown += [tpu.delete() for tpu in tpus]
        lost = "if slices are preempted: delete them, then all from the request on"
        shown.append(first.delete(lost))
        print(*shown, sep="\n\n")
        return
    command.check_travels(sorted(files))
    # Only once: a restarted run resumes with the source that it began with.
    if run(pack):
        raise UserError(f"could not {pack.about}: see git's output above.")
    pending, chosen = iter([*there.items()]), flags.FLAGS  # Shared by the threads.
    errors: list[str] = []

    def work(tpu: TpuSlice) -> None:
        keeper = Keeper(tpu, chosen.retries, chosen.pause)
        try:
            for name, program in pending:
                prepare = tpu.prepare(bundle) + tpu.copy_rows(program, chosen.data)
                try:
                    keeper.keep(prepare, tpu.start(program, stamp))
                except RunFailedError as error:
                    errors.append(f"{name}: {error}")
            if chosen.delete:
                keeper.delete()
        except UserError as error:
            # A run may be in progress: the slice is kept.
            errors.append(str(error))

    threads = [threading.Thread(target=work, args=(x,), daemon=True) for x in tpus]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        progress.say(
            "# runs that have started continue: the same command follows them, --stop "
            "ends them"
        )
        raise
    if errors:
        raise UserError("; ".join(errors))


def main(words: list[str]) -> None:
    """Validates the command, then runs or prints the commands of gcloud."""
    if flags.FLAGS.stop:
        stop(requested())
    else:
        launch({"the run": command.parse_program(words)}, requested())


if __name__ == "__main__":
    cli.run(main, positional=True)
