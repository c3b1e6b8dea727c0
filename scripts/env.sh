#!/usr/bin/env bash
# Creates .venv with the pinned packages and bpd_jax itself, unless it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

begin .venv "make env" "1 to 3 minutes, 3.6 GB" requirements.txt setup.py

# Shows pip's progress on one line of a terminal; otherwise nothing is shown.
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
# --no-compile, because the imports below compile the modules that are used.
pip_install --no-deps --no-compile -r requirements.txt
pip_install --no-deps --no-build-isolation -e .

# Imports the large packages: checks the environment, and caches their bytecode.
if [ -t 1 ]; then echo "  checking"; fi
PYTHONDONTWRITEBYTECODE="" TF_CPP_MIN_LOG_LEVEL=3 .venv/bin/python -c "
import flax.linen, hypothesis, jax, optax, orbax.checkpoint, pynini, tensorboardX
import bpd_jax.data.quiet_tensorflow
"
finish bpd_jax
