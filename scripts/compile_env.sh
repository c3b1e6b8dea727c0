#!/usr/bin/env bash
# Makes .venv-tpu or .venv-gpu with bpd_jax and a compiler, or finds it ready.
#
#   bash scripts/compile_env.sh tpu|gpu
#
# An environment of its own, because jax looks for an accelerator wherever its compiler is
# installed. It has what training and decoding need, without tensorflow.
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
# The versions are those of requirements.txt; jax says which libtpu goes with it.
pip_install --constraint requirements.txt --editable ".[$extra,gcs]"
finish "$compiler"
