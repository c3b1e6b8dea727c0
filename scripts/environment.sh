# Bash functions that create environments; sourced in the root of the repository.
#
# ENV/.bpd_jax is the state of an environment: empty during its creation, afterwards the
# checksum of its inputs. An incomplete or outdated environment is created again; one
# without this file is never replaced.

stop() {
  echo "error: $*" >&2
  exit 1
}

version() { "$1" -c "import sys; print(sys.version_info[:2])" 2>/dev/null; }

# begin ENV COMMAND SIZE FILE…: creates an environment without packages, or exits the
# script if it is up to date. COMMAND is for messages; the environment depends on the files.
begin() {
  env=$1
  local command=$2 size=$3 mark=$1/.bpd_jax
  shift 3
  # Including the path: an environment cannot be moved.
  wanted=$({ cat "$@"; pwd; } | cksum)
  if [ -f "$mark" ] && [ "$(cat "$mark")" = "$wanted" ] && "$env/bin/python" -c "" 2>/dev/null &&
    [ -z "${PYTHON:-}" -o "$(version "${PYTHON:-}")" = "$(version "$env/bin/python")" ]; then
    exit 0
  fi
  if [ -e "$env" ] && [ ! -f "$mark" ]; then
    stop "$env was not created by \"$command\": move it away, or delete it, and run again."
  fi
  find_python "$command"
  echo "Setting up $env ($size, once) ..."
  rm -rf "$env"
  mkdir "$env"
  : >"$mark"
  "$python" -m venv "$env"
}

# find_python COMMAND: sets python to $PYTHON, or to the first Python 3.11 or 3.12 that can
# create an environment.
find_python() {
  local supported="import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])"
  local candidate without_venv="" found
  for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
    "$candidate" -c "$supported" 2>/dev/null || continue
    if "$candidate" -c "import ensurepip, venv" 2>/dev/null; then
      python=$candidate
      return
    fi
    without_venv=$candidate
  done
  if [ -n "$without_venv" ]; then
    stop "$without_venv cannot create environments: install the package python3-venv."
  fi
  found=$("${PYTHON:-python3}" --version 2>/dev/null | grep -m 1 ^Python) || found="no Python"
  stop "Python 3.11 or 3.12 is needed and ${PYTHON:-python3} is $found:" \
    "install one of them, or give its path, as in: $1 PYTHON=/path/to/python3.12"
}

# pip_install ARGUMENTS…: runs pip in the environment; show_progress reads its output.
pip_install() {
  "$env/bin/python" -m pip install --disable-pip-version-check "$@" \
    2>"$env/pip.log" | show_progress || {
    grep -v '^WARNING' "$env/pip.log" >&2 || true
    stop "pip could not install the packages; run the command again."
  }
}

show_progress() { cat >/dev/null; }

# finish WORDS: marks the environment as up to date.
finish() {
  echo "$wanted" >"$env/.bpd_jax"
  echo "Ready: $env has $("$env/bin/python" --version) and $*."
}
