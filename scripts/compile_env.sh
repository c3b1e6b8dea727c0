#!/usr/bin/env bash
# Creates .venv-tpu or .venv-gpu with bpd_jax and a compiler, unless it is up to date.
#
#   bash scripts/compile_env.sh tpu|gpu
#
# A separate environment, because jax looks for an accelerator if its compiler is installed.
# It has the dependencies of training and decoding, without tensorflow.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

kind=${1:-}
case $kind in
  tpu) extra=tpu size="a minute, 1.7 GB" compiler=libtpu ;;
  gpu) extra=cuda13 size="two minutes, 5 GB" compiler="XLA for CUDA" ;;
  *) stop "give tpu or gpu, not \"$kind\"" ;;
esac
begin ".venv-$kind" "make $kind-compile" "$size" requirements.txt setup.py
# The versions are those of requirements.txt; jax determines the version of libtpu.
pip_install --constraint requirements.txt --editable ".[$extra,gcs]"
finish "$compiler"
