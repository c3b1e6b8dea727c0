#!/usr/bin/env bash
# Creates .venv-docs, which builds the site of docs/, unless it is up to date.
#
# A separate environment: the reference is read from the sources, so that neither jax nor
# tensorflow is needed, and .venv does not change.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

begin .venv-docs "make docs" "half a minute, 100 MB" requirements-docs.txt
pip_install --no-deps --requirement requirements-docs.txt
finish mkdocs
