"""Launches on TPU slices: the commands of gcloud and those run on the workers."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess

import pytest

from bpd_jax.base.errors import UserError
from bpd_jax.compilation import chips
from experiments.launch.tpu_slice import KINDS, TpuSlice
from tests.commands import start

ROOT = pathlib.Path(__file__).parent.parent.parent
PRETRAIN = "--gin_file=gin_configs/runs/pretrain.gin"
V4 = "--gin_file=gin_configs/meshes/v4_128.gin"
SLICE = TpuSlice("paper", "us-central2-b", "v4:4x4x4", "10.0.0.2:/runs", spot=True)
SLICE_FLAGS = [
    "--name=paper",
    "--zone=us-central2-b",
    "--share=10.0.0.2:/runs",
    "--workdir=blockwise_1b5",
]
FINETUNE = [
    "--gin_file=gin_configs/runs/finetune.gin",
    "--gin_file=gin_configs/tasks/squad.gin",
    "--gin_file=gin_configs/meshes/finetune_8.gin",
    "--gin.START='runs/base'",
]


def commands_of(text):
    """The words of every command that a dry run prints."""
    return [
        shlex.split(line) for line in text.splitlines() if line[:1] not in ("", "#")
    ]


def test_tpu_dry_run():
    valid, network, bucket, stop, *invalid = start(
        "experiments.launch.tpu",
        [
            *SLICE_FLAGS,
            "--topology=v4:4x4x4",
            "--spot",
            "--data=gs://bucket/rows",
            PRETRAIN,
            V4,
            "--gin.SEED=3",
            "--dry_run",
        ],
        [
            *SLICE_FLAGS,
            "--topology=v5e:16x16",
            "--slices=2",
            "--reserved",
            "--project=p",
            "--network=n",
            "--subnetwork=s",
            "--internal_ips",
            "--service_account=a@b",
            "--labels=team=nlp,run=base",
            PRETRAIN,
            "--gin_file=meshes/v5e_256.gin",
            "--dry_run",
        ],
        [
            "--name=paper",
            "--zone=us-central2-b",
            "--topology=v4:4x4x4",
            "--data=gs://bucket/rows",
            "--workdir=gs://bucket/runs/base/",
            PRETRAIN,
            V4,
            "--dry_run",
        ],
        ["--name=p", "--zone=z", "--topology=v4:4x4x4", "--stop", "--dry_run"],
        [*SLICE_FLAGS, "--topology=v9:4x4", PRETRAIN, "--dry_run"],
        [*SLICE_FLAGS, "--topology=v5e:4x4x4", PRETRAIN, "--dry_run"],
        [*SLICE_FLAGS, "--topology=v5e:4x4", PRETRAIN, V4, "--dry_run"],
        [*SLICE_FLAGS, "--topology=v4:4x4x4", PRETRAIN, "--gin.SEDE=3", "--dry_run"],
        [*SLICE_FLAGS, "--topology=v4:4x4x4", "--dry_run"],
        ["--topology=v4:4x4x4", PRETRAIN, "--dry_run"],
        [*SLICE_FLAGS, "--topology=v4:4x4x4", PRETRAIN, "--workdir=/x", "--dry_run"],
        [
            "--name=p",
            "--zone=z",
            "--topology=v4:4x4x4",
            "--workdir=x",
            PRETRAIN,
            "--dry_run",
        ],
        [
            "--name=p",
            "--zone=z",
            "--topology=v5e:2x4",
            "--workdir=gs://bucket/run",
            *FINETUNE[:-1],
            "--gin.START='../share/base'",
            "--dry_run",
        ],
        [*SLICE_FLAGS, "--topology=v4:4x4x4", PRETRAIN, "--workdir=gs://", "--dry_run"],
        [*SLICE_FLAGS, "--topology=v5e:2x4", *FINETUNE, "--dry_run"],
        [*SLICE_FLAGS, "--topology=v5e:4x8", "--slices=3", PRETRAIN, V4, "--dry_run"],
    )
    assert valid.returncode == 0, valid.stderr
    commands = commands_of(valid.stdout)
    verbs = [
        words[4] if words[0] == "gcloud" else " ".join(words[:2]) for words in commands
    ]
    states = ["describe", "describe"]
    last_verbs = ["ssh", "delete"]
    assert verbs == ["git -C", "create", *states, "scp", *["ssh"] * 4, *last_verbs]
    assert {"--type=v4", "--topology=4x4x4", "--spot"} <= set(commands[1])
    assert "--node-id=paper" in commands[1]
    remote = {
        word.partition("=")[2]: words
        for words in commands
        for word in words
        if word.startswith("--command=")
    }
    setup, data, begin, follow, _ = remote
    assert commands[0][2:5] == [str(ROOT), "bundle", "create"]
    assert commands[0][5] in commands[4]
    assert "tpu_setup.sh 10.0.0.2:/runs" in setup
    assert "rsync -r gs://bucket/rows share/blockwise_1b5/data" in data
    assert {"--node=0", "--worker=0"} <= set(remote[data]) & set(remote[follow])
    # Commands for all workers must be short: gcloud connects to 64 workers at a time.
    assert {"--node=all", "--worker=all"} <= set(remote[begin]) & set(remote[setup])
    # The command as the shell of a worker parses it.
    program = shlex.split(begin.partition("detached.py ")[2])
    assert program[:2] == ["bpd_jax_run", "start"]
    # The ID of the attempt begins with that of the launch.
    assert program[2] == f"{program[3]}-1"
    assert program[4:6] == ["bash", "-c"]
    assert program[2] in follow
    # A host that vanishes is noticed.
    alive = ["-oServerAliveInterval=30", "-oServerAliveCountMax=4"]
    assert {f"--ssh-flag={flag}" for flag in alive} <= set(remote[follow])
    assert {f"--scp-flag={flag}" for flag in alive} <= set(commands[4])
    arguments = shlex.split(program[6].removeprefix("cd bpd_jax && exec "))
    assert arguments == [
        ".venv/bin/python",
        "-m",
        "bpd_jax.train",
        PRETRAIN,
        V4,
        "--gin_bindings=SEED = 3",
        "--workdir=../share/blockwise_1b5",
        "--distributed",
    ]
    assert network.returncode == 0, network.stderr
    commands = commands_of(network.stdout)
    assert {
        "--accelerator-type=v5litepod-256",
        "--node-count=2",
        "--node-prefix=paper",
        "--reserved",
        "--network=n",
        "--subnetwork=s",
        "--internal-ips",
        "--service-account=a@b",
        "--labels=team=nlp,run=base",
        "--project=p",
    } <= set(commands[1])
    assert [words[5] for words in commands[3:5]] == ["paper-0", "paper-1"]
    assert all("--internal-ip" in words for words in commands if words[4:5] == ["ssh"])
    assert bucket.returncode == 0, bucket.stderr
    assert "mountpoint" not in bucket.stdout
    assert "share" not in bucket.stdout
    assert "rsync -r gs://bucket/rows gs://bucket/runs/base/data" in bucket.stdout
    assert "--workdir=gs://bucket/runs/base " in bucket.stdout
    assert stop.returncode == 0, stop.stderr
    [words] = commands_of(stop.stdout)
    assert words[-1] == "--quiet"
    assert any(word.endswith("bpd_jax_run stop") for word in words)
    for result, words in zip(
        invalid,
        [
            "--topology=v9:4x4 is not known",
            "--topology=v5e:4x4x4 is not a slice that Cloud offers",
            "MeshConfig asks for data × fsdp × model = -1 × 64 × 1, but there are 16",
            "nothing uses SEDE; did you mean SEED",
            "--gin_file is missing",
            "--name is missing",
            "--workdir=/x must be a folder under gs://, or one within the share",
            "--share is missing: give it, or a folder such as gs://BUCKET/x",
            "TrainConfig.start = '../share/base' is not a folder of the workers",
            "is not a path such as gs://bucket/folder",
            "TrainConfig.start = 'runs/base' is not a folder of the workers",
            "but there are 96 devices",
        ],
        strict=True,
    ):
        assert result.returncode == 1
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="no gcloud here")
def test_gcloud_accepts_every_command(tmp_path):
    """gcloud checks commands without running them, or logging in."""
    all_options = TpuSlice(
        "paper",
        "us-east5-a",
        "v5p:4x4x8",
        "h:/r",
        slices=2,
        project="p",
        spot=True,
        network="n",
        subnetwork="s",
        internal_ips=True,
        service_account="a@b",
        labels=("team=nlp", "run=base"),
    )
    slices = [all_options, SLICE, TpuSlice("a", "b", "v6e:4x4", "h:/r", iap=True)]
    commands = [
        *(tpu.create() for tpu in slices),
        *(tpu.start(("python", "-m", "x y"), "1") for tpu in slices),
        *all_options.prepare("x.bundle"),
        all_options.copy_data("gs://b/rows", "w"),
        all_options.follow("1"),
        all_options.running(),
        all_options.running("all"),
        all_options.fetch("w"),
        all_options.report(),
        all_options.stop(),
        all_options.describe(),
        all_options.describe_node("paper-0"),
        all_options.delete(),
    ]
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([{"command_string": c.line} for c in commands]))
    command = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={file}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.stdout.startswith("["):
        pytest.skip("this gcloud does not check commands")
    checked = json.loads(result.stdout)
    assert len(checked) == len(commands)
    assert [
        verdict["error_message"] for verdict in checked if not verdict["success"]
    ] == []


def test_number_of_devices_of_a_slice():
    assert SLICE.devices == (64, 128)
    assert TpuSlice("a", "b", "v4-megacore:4x4x8", "h:/r").devices == (128,)
    assert TpuSlice("a", "b", "v5e:16x16", "h:/r").devices == (256,)
    assert TpuSlice("a", "b", "v6e:4x4", "h:/r", slices=3).devices == (48,)
    tpus = {name for name, chip in chips.CHIPS.items() if not chip.gpu}
    assert KINDS.keys() == tpus


@pytest.mark.parametrize(
    "topology",
    [
        "v4:4x4",
        "v5e:4x4x4",
        "v4:0x4x4",
        "v4:3x5x7",
        "v4:8x4x4",
        "v6e:3x3",
        "v5p:4",
        "v4",
    ],
)
def test_unavailable_slices_are_refused(topology):
    with pytest.raises(UserError, match=f"--topology={topology} is not a slice"):
        TpuSlice("a", "b", topology, "h:/r")


@pytest.mark.parametrize(
    "topology, flags",
    [
        ("v4:2x2x1", ["--type=v4", "--topology=2x2x1"]),
        ("v4:8x8x12", ["--type=v4", "--topology=8x8x12"]),
        ("v4:4x4x16", ["--type=v4", "--topology=4x4x16"]),
        ("v4-megacore:4x4x4", ["--type=v4", "--topology=4x4x4"]),
        ("v5p:2x2x1", ["--accelerator-type=v5p-8"]),
        ("v5p:4x4x8", ["--accelerator-type=v5p-256"]),
        ("v5p:8x8x12", ["--accelerator-type=v5p-1536"]),
        ("v5e:2x4", ["--accelerator-type=v5litepod-8"]),
        ("v6e:1x1", ["--accelerator-type=v6e-1"]),
    ],
)
def test_flags_of_available_slices(topology, flags):
    words = TpuSlice("a", "b", topology, "h:/r").create().words
    assert list(words[6:8])[: len(flags)] == flags


def test_v5p_has_one_topology_per_number_of_chips():
    """gcloud specifies a v5p slice only by its number of cores."""
    with pytest.raises(UserError, match="provides 256 chips of v5p as 4x8x8"):
        TpuSlice("a", "b", "v5p:4x4x16", "h:/r")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "My_slice"}, "--name=My_slice must be lower-case"),
        ({"share": "/runs"}, "--share=/runs is not HOST:/FOLDER"),
        ({"share": "gs://bucket/runs"}, "--share=gs://bucket/runs is not HOST:/FOLDER"),
        ({"slices": 0}, "--slices must be a positive integer, not 0"),
        ({"spot": True, "reserved": True}, "exclude each other"),
        ({"labels": ("Team=nlp",)}, "--labels=Team=nlp must be KEY=VALUE"),
    ],
)
def test_invalid_requests_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        TpuSlice(
            **{"name": "a", "zone": "b", "topology": "v4:4x4x4"}
            | {"share": "h:/r"}
            | fields
        )


def test_worker_setup_script(tmp_path):
    script = tmp_path / "code" / "experiments" / "launch" / "tpu_setup.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "experiments" / "launch" / "tpu_setup.sh", script)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in {
        "mountpoint": f'test -e "{tmp_path}/mounted"',
        "sudo": f'case "$1" in mount) touch "{tmp_path}/mounted" ;; esac',
        "python3": f"""case "$*" in *" venv "*)
            mkdir -p .venv/bin && cp "{tools}/mountpoint" .venv/bin/python ;; esac""",
    }.items():
        (tools / name).write_text(
            f'#!/bin/sh\necho {name} "$*" >> "{tmp_path}/log"\n{body}\n'
        )
        (tools / name).chmod(0o755)
    command = ["bash", str(script), "10.0.0.2:/runs"]
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    for _ in range(2):
        environment = {**os.environ, "HOME": str(tmp_path), "PATH": path}
        subprocess.run(command, check=True, env=environment)
    log = (tmp_path / "log").read_text().splitlines()
    mounts = [line for line in log if line.startswith("sudo mount")]
    assert mounts == [f"sudo mount -t nfs -o rw,hard 10.0.0.2:/runs {tmp_path}/share"]
    # The Python version of the figures in docs/tpu.md; newer Python gets another jax.
    environments = [line for line in log if "uv venv" in line]
    assert environments == ["python3 -m uv venv --quiet --seed --python 3.11 .venv"]
    (tmp_path / "log").unlink()
    (tmp_path / "mounted").unlink()
    (tmp_path / "code" / ".venv" / "bin" / "python").write_text("#!/bin/sh\n")
    subprocess.run(command[:2], check=True, env=environment)
    assert not (tmp_path / "log").exists()  # neither mount nor anything else
