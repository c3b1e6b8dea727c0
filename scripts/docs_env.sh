#!/usr/bin/env bash
# Makes .venv-docs with what builds the site of docs/, or finds it ready.
#
# An environment of its own: the reference is read from the sources, so that neither jax
# nor tensorflow is needed, and `make env` stays as it is. .venv-docs/.bpd_jax holds the
# checksum of what it was made from.
set -euo pipefail
cd "$(dirname "$0")/.."

MARK=.venv-docs/.bpd_jax

stop() {
  echo "error: $*" >&2
  exit 1
}

wanted=$({ cat requirements-docs.txt; pwd; } | cksum)
if [ -f "$MARK" ] && [ "$(cat "$MARK")" = "$wanted" ] && .venv-docs/bin/python -c "" 2>/dev/null; then
  exit 0
fi
if [ -e .venv-docs ] && [ ! -f "$MARK" ]; then
  stop ".venv-docs was not made by \"make docs\": move it away, or delete it."
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
    "make docs PYTHON=/path/to/python3.12"
fi

echo "Setting up .venv-docs (half a minute, 100 MB, once) ..."
rm -rf .venv-docs
mkdir .venv-docs
: >"$MARK"
"$python" -m venv .venv-docs
.venv-docs/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
  --requirement requirements-docs.txt 2>.venv-docs/pip.log || {
  grep -v '^WARNING' .venv-docs/pip.log >&2 || true
  stop "pip could not install the packages; run again, and it starts anew."
}
echo "$wanted" >"$MARK"
echo "Ready: .venv-docs has $(.venv-docs/bin/python --version) and mkdocs."
