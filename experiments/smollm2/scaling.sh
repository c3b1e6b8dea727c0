#!/usr/bin/env bash
# The scaling curve of drafters: three arms, each trained on increasing numbers of texts.
#
#   [ANCHORS=640000] [PROMPTS=FILE] [OUTPUT=FILE] \
#       experiments/smollm2/scaling.sh TEXTS RUNS [NUMBER_OF_TEXTS…]
#
# TEXTS is a folder of python -m bpd_jax.distill; RUNS gets the cached states, which all
# runs share, and a folder for each run. All runs have the same held-out texts and draw the
# same number of positions, ANCHORS, so that they differ in the amount of text, not in
# training. Interrupted runs resume and finished ones are skipped. With the texts, distill
# can write the states:
#   --states=RUNS/states --feature_layers=2,15,28 --states_dtype=bfloat16
# PROMPTS, a file of held-out prompts, are decoded with every drafter, to measure tokens
# and milliseconds per call: run nothing else on the machine then.
set -euo pipefail
texts=$(realpath "$1")
mkdir -p "$2"
runs=$(realpath "$2")
shift 2
counts=("$@")
[ ${#counts[@]} -gt 0 ] || counts=(1700 5400 15400)
[ -z "${PROMPTS:-}" ] || PROMPTS=$(realpath "$PROMPTS")
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
anchors=${ANCHORS:-640000}
output=${OUTPUT:-benchmarks/results/drafter_scaling.json}

train() {
  local arm=$1 batch=$2 run=$runs/$1-$3
  if [ -e "$run/heads/heads.json" ] || [ -e "$run/drafter/drafter.json" ]; then
    echo "$run is finished"
    return
  fi
  "$python" -m bpd_jax.train --gin_file="experiments/smollm2/$arm.gin" \
    --workdir="$run" --gin.DATA="'$texts'" \
    --gin.HeadsTrainConfig.states="'$runs/states'" \
    --gin.HeadsTrainConfig.states_dtype="'bfloat16'" \
    --gin.HeadsTrainConfig.train_texts="$3" \
    --gin.HeadsTrainConfig.batch_size="$batch" \
    --gin.HeadsTrainConfig.evaluate_every=1000 \
    --gin.HeadsTrainConfig.steps=$((anchors / batch))
}

decode() {
  local run=$runs/$1-$2 source=$3 drafter=$4
  if [ -e "$run/decoding.json" ]; then
    echo "$run has been timed"
    return
  fi
  "$python" -m benchmarks.decoding --model=smollm2 "--$drafter=$run/$drafter" \
    --methods="$source/greedy,$source/tree:8" --prompts_file="$PROMPTS" \
    --max_new_tokens=48 --rounds=2 --output="$run/decoding.json"
}

# The drafter comes first: its states include those of the other arms.
for count in "${counts[@]}"; do train drafter 128 "$count"; done
for count in "${counts[@]}"; do train conditioned_heads 512 "$count"; done
for count in "${counts[@]}"; do train heads 512 "$count"; done
if [ -n "${PROMPTS:-}" ]; then
  for count in "${counts[@]}"; do
    decode drafter "$count" block drafter
    decode conditioned_heads "$count" heads heads
    decode heads "$count" heads heads
  done
fi
# Results name no folder of this machine.
"$python" -m benchmarks.drafter_scaling --runs="$(realpath --relative-to=. "$runs")" \
  --output="$output"
