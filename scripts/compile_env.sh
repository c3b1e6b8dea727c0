#!/usr/bin/env bash
# Makes .venv-tpu or .venv-gpu with bpd_jax and a compiler, or finds it ready.
#
#   bash scripts/compile_env.sh tpu|gpu
#
# An environment of its own, because jax looks for an accelerator wherever its compiler is
# installed. It has what training and decoding need, without tensorflow. Its file .bpd_jax
# contains the checksum of what it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-}
case $kind in
  tpu) extra=tpu size="a minute, 1.7 GB" compiler=libtpu ;;
  gpu) extra=cuda13 size="two minutes, 5 GB" compiler="XLA for CUDA" ;;
  *) echo "error: give tpu or gpu, not \"$kind\"" >&2; exit 1 ;;
esac
env=.venv-$kind
MARK=$env/.bpd_jax

stop() {
  echo "error: $*" >&2
  exit 1
}

wanted=$({ cat requirements.txt setup.py; pwd; } | cksum)
if [ -f "$MARK" ] && [ "$(cat "$MARK")" = "$wanted" ] && "$env/bin/python" -c "" 2>/dev/null; then
  exit 0
fi
if [ -e "$env" ] && [ ! -f "$MARK" ]; then
  stop "$env was not made by \"make $kind-compile\": move it away, or delete it."
fi

SUPPORTED="import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])"
python=""
for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
  if "$candidate" -c "$SUPPORTED" 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  stop "Python 3.11 or 3.12 that can make environments is needed: name it, as in:" \
    "make $kind-compile PYTHON=/path/to/python3.12"
fi

echo "Setting up $env ($size, once) ..."
rm -rf "$env"
mkdir "$env"
: >"$MARK"
"$python" -m venv "$env"
# The versions are those of requirements.txt; jax says which libtpu goes with it.
"$env/bin/python" -m pip install --disable-pip-version-check --quiet \
  --constraint requirements.txt --editable ".[$extra,gcs]" 2>"$env/pip.log" || {
  grep -v '^WARNING' "$env/pip.log" >&2 || true
  stop "pip could not install the packages; run again, and it starts anew."
}
echo "$wanted" >"$MARK"
echo "Ready: $env has $("$env/bin/python" --version) and $compiler."
