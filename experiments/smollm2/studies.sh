#!/usr/bin/env bash
# Builds the unshipped models that studies of SmolLM2 compare: n-gram models of the model's
# own texts and of a corpus, a Markov refiner, rescorers.
#
#   bash experiments/smollm2/studies.sh CORPUS
#
# CORPUS is a glob of JSON Lines with the field `text`. Studies leave out contenders whose
# models are missing.
#
#   needs    runs/smollm2/{texts,states}: recipe.sh makes those of 1,210 texts; the committed
#            results are of 15,259 texts (bpd_jax/shipped/smollm2/README.md)
#   makes    runs/smollm2/{own_2,own_3,general_2,general_4},
#            runs/smollm2/refiners/markov, runs/smollm2/rescorer_{narrow,deep} and, if
#            table7 has run before, runs/smollm2/in_domain/TASK;
#            runs/smollm2/training, the runs of the rescorers
#   takes    n-grams five minutes on two busy cores, the refiner twelve,
#            rescorers an hour
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
run=runs/smollm2
corpus="${1:?give a glob of JSON Lines}"

for order in 2 3; do
    "$python" -m bpd_jax.build_ngram --generations="$run/texts" --split=all \
        --order="$order" --output="$run/own_$order"
done
"$python" -m bpd_jax.build_ngram --text="$corpus" --order=2 --max_ngrams=4000000 \
    --vocabulary=bpd_jax/shipped/smollm2/rescorer --output="$run/general_2"
"$python" -m bpd_jax.build_ngram --text="$corpus" --order=4 --max_ngrams=4000000 \
    --min_counts=1,1,2,4 --vocabulary=bpd_jax/shipped/smollm2/rescorer \
    --output="$run/general_4"
"$python" -m bpd_jax.train_refiner --model=smollm2 --kind=markov --data="$run/states" \
    --steps=300 --batch_size=512 --learning_rate=2e-3 --output="$run/refiners/markov"
for shape in narrow deep; do
    "$python" -m bpd_jax.train --gin_file=experiments/smollm2/rescorer.gin \
        --gin_file="gin_configs/models/rescorer_smollm2_$shape.gin" \
        --workdir="$run/training/rescorer_$shape"
    "$python" -m bpd_jax.export_params --model="$run/training/rescorer_$shape" \
        --precision=float32 --output="$run/rescorer_$shape"
done
for texts in runs/paper/smollm2/in_domain_texts/*.jsonl; do
    [ -e "$texts" ] || break
    task=$(basename "$texts" .jsonl)
    "$python" -m bpd_jax.train --gin_file=experiments/smollm2/in_domain.gin \
        --gin.TEXT_FILES="'$texts'" --workdir="$run/in_domain/$task"
done
