#!/usr/bin/env bash
# Makes .venv with the pinned packages and bpd_jax itself, or finds it ready.
#
# .venv/.bpd_jax says what state the environment is in: empty while it is being made,
# afterwards the checksum of what it was made from. An environment that is half made
# or out of date is made again; one that somebody else made is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

MARK=.venv/.bpd_jax

stop() {
  echo "error: $*" >&2
  exit 1
}

# The folder counts too: an environment does not survive being moved.
wanted=$({ cat requirements.txt setup.py; pwd; } | cksum)
version() { "$1" -c "import sys; print(sys.version_info[:2])" 2>/dev/null; }
if [ -f "$MARK" ] && [ "$(cat "$MARK")" = "$wanted" ] && .venv/bin/python -c "" 2>/dev/null &&
  [ -z "${PYTHON:-}" -o "$(version "${PYTHON:-}")" = "$(version .venv/bin/python)" ]; then
  exit 0
fi
if [ -e .venv ] && [ ! -f "$MARK" ]; then
  stop ".venv was not made by \"make env\": move it away, or delete it, and run again."
fi

# $PYTHON, or the first of these that is 3.11 or 3.12 and can make an environment.
SUPPORTED="import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])"
python="" without_venv=""
for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
  "$candidate" -c "$SUPPORTED" 2>/dev/null || continue
  if "$candidate" -c "import ensurepip, venv" 2>/dev/null; then
    python=$candidate
    break
  fi
  without_venv=$candidate
done
if [ -z "$python" ] && [ -n "$without_venv" ]; then
  stop "$without_venv cannot make environments: install the package python3-venv."
elif [ -z "$python" ]; then
  found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "no Python")
  stop "Python 3.11 or 3.12 is needed and ${PYTHON:-python3} is $found:" \
    "install one of them, or name it, as in: make env PYTHON=/path/to/python3.12"
fi

echo "Setting up .venv (1 to 3 minutes, 3 GB, once) ..."
rm -rf .venv
mkdir .venv
: >"$MARK"
"$python" -m venv .venv

# Counts pip's packages on one line of a terminal; elsewhere nothing is shown.
total=$(.venv/bin/python - <<'END'
import re, sys
old = sys.version_info < (3, 12)
lines = [line for line in open("requirements.txt") if re.match(r"\w", line)]
print(sum((">=" not in line) if old else ("<" not in line) for line in lines))
END
)
show_progress() {
  if [ -t 1 ]; then
    awk -v total="$total" '
      /^(Collecting|Processing) / {
        sub(".*/", "", $2)
        printf "\r\033[K  fetching %d of %d: %s", ++n, total, $2
      }
      /^Installing/ && n { printf "\r\033[K  installing %d packages", n }
      { fflush() } END { printf "\r\033[K" }'
  else
    cat >/dev/null
  fi
}
pip_install() {
  .venv/bin/python -m pip install --disable-pip-version-check --no-deps "$@" \
    2>.venv/pip.log | show_progress || {
    grep -v '^WARNING' .venv/pip.log >&2 || true
    stop "pip could not install the packages; run again, and it starts anew."
  }
}
# --no-compile, because the next step compiles the part that is used.
pip_install --no-compile -r requirements.txt
pip_install --no-build-isolation -e .

# One import of the large packages: proves the environment, and keeps their bytecode.
if [ -t 1 ]; then echo "  checking"; fi
PYTHONDONTWRITEBYTECODE="" TF_CPP_MIN_LOG_LEVEL=3 .venv/bin/python -c "
import flax.linen, hypothesis, jax, optax, orbax.checkpoint, pynini, tensorboardX
import bpd_jax.data.quiet_tensorflow
"
echo "$wanted" >"$MARK"
echo "Ready: .venv has $(.venv/bin/python --version) and bpd_jax."
