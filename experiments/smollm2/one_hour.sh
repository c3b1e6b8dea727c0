#!/usr/bin/env bash
# Trains a block drafter with a selector, and 4-grams, for another model in about an hour
# on two cores, and measures them.
#
#   experiments/smollm2/one_hour.sh FOLDER MODEL RUN instructions|passages [FLAGS]
#
# FOLDER contains public data sets as JSON Lines; see one_hour_prompts.py. `passages` is
# for models without a chat template, which continue them. MODEL and RUN are relative to
# the repository; TEXTS is the number of prompts, STEPS that of steps. FLAGS are further
# flags of the training.
#
#   makes    RUN/{prompts,texts,states,drafter,ngram} and, in RUN, refiners.json and
#            decoding_{float32,int8}.json
set -euo pipefail
data=$(realpath "$1") model="$2" run="$3" kind="$4"
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
chat=()
if [ "$kind" = passages ]; then chat=(--nochat); fi

"$python" experiments/smollm2/one_hour_prompts.py --data="$data" --output="$run/prompts"
head -n "${TEXTS:-1024}" "$run/prompts/$kind.jsonl" > "$run/prompts/train.jsonl"

"$python" -m bpd_jax.distill --model="$model" --precision=int8 "${chat[@]}" \
    --prompts_file="$run/prompts/train.jsonl" --max_new_tokens=128 \
    --longest_prompt=128 --batch_size=32 --output="$run/texts" \
    --states="$run/states" --feature_layers=default --states_dtype=bfloat16
"$python" -m bpd_jax.train --gin_file=gin_configs/runs/drafter.gin \
    --workdir="$run/drafter" --gin.MODEL="'$model'" --gin.DATA="'$run/texts'" \
    --gin.HeadsTrainConfig.states="'$run/states'" \
    --gin.NUM_LAYERS=1 --gin.BLOCK_SIZE=7 --gin.READS_LAST_TOKEN=True \
    --gin.BlockDrafterConfig.markov_rank=64 \
    --gin.BlockDrafterConfig.markov_reads_state=True \
    --gin.HeadsTrainConfig.batch_size=128 --gin.HeadsTrainConfig.steps="${STEPS:-800}" \
    --gin.OptimizerConfig.weight_decay=0.1 "${@:5}"
"$python" -m bpd_jax.build_ngram --generations="$run/texts" --answers_only --split=all \
    --order=4 --output="$run/ngram"

assets=(--model="$model" --drafter="$run/drafter/drafter" --ngram="$run/ngram")
held_out=(--prompts_file="$run/prompts/heldout_$kind.jsonl")
questions=(--prompts_file="$run/prompts/heldout_questions.jsonl")
n=ngram:alpha=0.25
methods=lookup:4
for search in greedy best:16 tree:8 tree:32; do
    methods+=,block/$search,block+markov/$search,block+$n/$search,block+markov+$n/$search
done
"$python" -m benchmarks.refiners "${assets[@]}" "${chat[@]}" "${held_out[@]}" \
    "${questions[@]}" --max_new_tokens=48 --baseline=block/greedy \
    --methods="$methods,block+markov+ngram:alpha=0.5/tree:8" \
    --output="$run/refiners.json"
for kind in "$kind" questions; do
    head -n 12 "$run/prompts/heldout_$kind.jsonl"
done > "$run/speed.jsonl"
methods=lookup:4,block/tree:4,block/tree:8,block+markov/tree:4,block+markov/tree:8
methods+=,block+markov/tree:8:price=1.4+lookup:4
for precision in float32 int8; do
    "$python" -m benchmarks.decoding "${assets[@]}" "${chat[@]}" \
        --prompts_file="$run/speed.jsonl" --precision="$precision" --batch_size=1 \
        --max_new_tokens=48 --rounds=1 --methods="$methods" \
        --output="$run/decoding_$precision.json"
done
