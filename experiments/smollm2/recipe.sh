#!/usr/bin/env bash
# Trains heads, n-grams and a rescorer for SmolLM2 from 1,210 texts.
#
#   bash experiments/smollm2/recipe.sh FOLDER
#
# FOLDER contains public data sets as JSON Lines; see prompts.py. Without it the model
# generates all its prompts itself.
#
#   needs    two cores and some hours, or a GPU
#   makes    runs/smollm2/{texts,heads,ngram,rescorer}, which `--model=smollm2`
#            then uses instead of the shipped ones; runs/smollm2/training, the run of the
#            rescorer
#
# The shipped heads are of 32,001 texts (equal_shares.sh), drafter and n-gram model of
# 25,181, the rescorer of 15,259 others (shipped.sh, bpd_jax/shipped/smollm2/README.md).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
run=runs/smollm2

prompts=()
if [ $# -gt 0 ]; then
    "$python" experiments/smollm2/prompts.py --data="$1" --output="$run/prompts"
    prompts=(--prompts_file="$run/prompts/train.jsonl")
fi

"$python" -m bpd_jax.distill --model=smollm2 "${prompts[@]}" --made_up_prompts=600 \
    --max_new_tokens=256 --longest_prompt=480 --batch_size=64 --output="$run/texts"
"$python" -m bpd_jax.train --gin_file=experiments/smollm2/heads.gin --workdir="$run" \
    --gin.DATA="'$run/texts'"
"$python" -m bpd_jax.build_ngram --generations="$run/texts" --split=all --order=4 \
    --output="$run/ngram"
"$python" -m bpd_jax.train --gin_file=experiments/smollm2/rescorer.gin \
    --workdir="$run/training/rescorer"
"$python" -m bpd_jax.export_params --model="$run/training/rescorer" \
    --precision=float32 --output="$run/rescorer"
