#!/usr/bin/env bash
# Makes .venv-docs with what builds the site of docs/, or finds it ready.
#
# An environment of its own: the reference is read from the sources, so that neither jax
# nor tensorflow is needed, and `make env` stays as it is.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

begin .venv-docs "make docs" "half a minute, 100 MB" requirements-docs.txt
pip_install --no-deps --requirement requirements-docs.txt
finish mkdocs
