#!/usr/bin/env bash
# The scaling curve of drafters: three arms, each trained on increasing numbers of texts.
#
#   experiments/smollm2/scaling.sh TEXTS RUNS [NUMBER_OF_TEXTS…]
#
# TEXTS is a folder of python -m bpd_jax.distill; RUNS gets the cached states, which all
# runs share, and a folder for each run. All runs have the same held-out texts. Interrupted
# runs resume and finished ones are skipped. With the texts, distill can write the states:
#   --states=RUNS/states --feature_layers=2,15,28 --states_dtype=bfloat16
set -euo pipefail
texts=$1 runs=$2
shift 2
counts=("$@")
[ ${#counts[@]} -gt 0 ] || counts=(1000 3000 10000)
python=${PYTHON:-python}

train() {
  local arm=$1 config=$2 count=$3
  shift 3
  local run=$runs/$arm-$count
  if [ -e "$run/heads/heads.json" ] || [ -e "$run/drafter/drafter.json" ]; then
    echo "$run is finished"
    return
  fi
  "$python" -m bpd_jax.train --gin_file="experiments/smollm2/$config.gin" \
    --workdir="$run" --gin.DATA="'$texts'" \
    --gin.HeadsTrainConfig.states="'$runs/states'" \
    --gin.HeadsTrainConfig.states_dtype="'bfloat16'" \
    --gin.HeadsTrainConfig.train_texts="$count" "$@"
}

for count in "${counts[@]}"; do
  # The drafter comes first: its states include those of the other arms.
  train block_drafter drafter "$count"
  train conditioned_heads conditioned_heads "$count"
  train heads heads "$count"
done
"$python" -m benchmarks.drafter_scaling --runs="$runs"
