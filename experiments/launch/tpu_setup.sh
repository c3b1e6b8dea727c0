#!/usr/bin/env bash
# Prepares one worker of a TPU slice; idempotent.
#
#   bash experiments/launch/tpu_setup.sh [HOST:/FOLDER]
#
#   makes    .venv in the checkout, with bpd_jax and jax for TPU; if a share is given,
#            ~/share, mounted, and `runs` in the checkout, a link to it
#   needs    Ubuntu with sudo, as Cloud TPU VMs have it
set -euo pipefail
cd "$(dirname "$0")/../.."
share="${1:-}"

if [ -n "$share" ] && ! mountpoint -q "$HOME/share"; then
    sudo apt-get -qq -o DPkg::Lock::Timeout=300 update
    sudo apt-get -qq -o DPkg::Lock::Timeout=300 install -y nfs-common
    mkdir -p "$HOME/share"
    sudo mount -t nfs -o rw,hard "$share" "$HOME/share"
fi
if [ -n "$share" ] && [ ! -L runs ]; then
    if [ -e runs ]; then
        echo "runs is a folder of this worker: move what it holds to ../share" >&2
        exit 1
    fi
    ln -s ../share runs
fi

# The image's own Python may be older, and requirements.txt has another jax for 3.12; the
# figures of docs/measured.md are of 3.11.
if [ ! -x .venv/bin/python ]; then
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --python 3.11 .venv
fi
.venv/bin/python -m pip install --quiet --constraint requirements.txt -e '.[tpu,gcs,eval,lm_eval]'
.venv/bin/python -c "import bpd_jax.training.trainer"
