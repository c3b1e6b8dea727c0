#!/usr/bin/env bash
# Makes .venv-tpu with bpd_jax and the TPU compiler, or finds it ready.
#
# An environment of its own, because jax looks for a TPU wherever libtpu is installed. It
# has what training and decoding need, without tensorflow. .venv-tpu/.bpd_jax holds the
# checksum of what it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."

MARK=.venv-tpu/.bpd_jax

stop() {
  echo "error: $*" >&2
  exit 1
}

wanted=$({ cat requirements.txt setup.py; pwd; } | cksum)
if [ -f "$MARK" ] && [ "$(cat "$MARK")" = "$wanted" ] && .venv-tpu/bin/python -c "" 2>/dev/null; then
  exit 0
fi
if [ -e .venv-tpu ] && [ ! -f "$MARK" ]; then
  stop ".venv-tpu was not made by \"make tpu-compile\": move it away, or delete it."
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
    "make tpu-compile PYTHON=/path/to/python3.12"
fi

echo "Setting up .venv-tpu (a minute, 1.7 GB, once) ..."
rm -rf .venv-tpu
mkdir .venv-tpu
: >"$MARK"
"$python" -m venv .venv-tpu
# The versions are those of requirements.txt; jax says which libtpu goes with it.
.venv-tpu/bin/python -m pip install --disable-pip-version-check --quiet \
  --constraint requirements.txt --editable ".[tpu,gcs]" 2>.venv-tpu/pip.log || {
  grep -v '^WARNING' .venv-tpu/pip.log >&2 || true
  stop "pip could not install the packages; run again, and it starts anew."
}
echo "$wanted" >"$MARK"
echo "Ready: .venv-tpu has $(.venv-tpu/bin/python --version) and libtpu."
