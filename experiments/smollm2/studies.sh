#!/usr/bin/env bash
# Builds the unshipped models that studies of SmolLM2 compare: n-gram models of the model's
# own texts and of a corpus, rescorers.
#
#   bash experiments/smollm2/studies.sh CORPUS
#
# CORPUS is a glob of JSON Lines with the field `text`. Studies leave out contenders whose
# models are missing. The 2- and 3-grams of the model's own texts are the shipped 4-grams
# without their longer n-grams, so that all three were counted in the same texts.
#
#   makes    runs/smollm2/{own_2,own_3,general_2,general_4},
#            runs/smollm2/general_neural{,_narrow,_deep} and, if table7 has run before,
#            runs/smollm2/in_domain/TASK, and runs/paper/smollm2/in_domain_mixed/TASK, the task's
#            n-grams interpolated with unigrams of the corpus; runs/smollm2/training, the
#            runs of the rescorers
#   takes    n-grams five minutes on two busy cores, rescorers an hour
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
run=runs/smollm2
corpus="${1:?give a glob of JSON Lines}"

shorter_ngrams() {
    "$python" -m bpd_jax.build_ngram --model=bpd_jax/shipped/smollm2/ngram \
        --max_per_order="$1" --output="$2"
}
shorter_ngrams all,0,0 "$run/own_2"
shorter_ngrams all,all,0 "$run/own_3"
"$python" -m bpd_jax.build_ngram --text="$corpus" --order=2 --max_ngrams=4000000 \
    --vocabulary=bpd_jax/shipped/smollm2/rescorer --output="$run/general_2"
"$python" -m bpd_jax.build_ngram --text="$corpus" --order=4 --max_ngrams=4000000 \
    --min_counts=1,1,2,4 --vocabulary=bpd_jax/shipped/smollm2/rescorer \
    --output="$run/general_4"
for shape in "" _narrow _deep; do
    "$python" -m bpd_jax.train --gin_file=experiments/smollm2/corpus_rescorer.gin \
        --gin_file="gin_configs/models/rescorer_smollm2$shape.gin" \
        --gin.TEXT_FILES="'$corpus'" --workdir="$run/training/general_neural$shape"
    "$python" -m bpd_jax.export_params --model="$run/training/general_neural$shape" \
        --precision=float32 --output="$run/general_neural$shape"
done
for texts in runs/paper/smollm2/in_domain_texts/*.jsonl; do
    [ -e "$texts" ] || break
    task=$(basename "$texts" .jsonl)
    "$python" -m bpd_jax.train --gin_file=experiments/smollm2/in_domain.gin \
        --gin.TEXT_FILES="'$texts'" --workdir="$run/in_domain/$task"
    "$python" -m bpd_jax.build_ngram --model="runs/paper/smollm2/in_domain/$task" \
        --unigrams="$run/general_2" --output="runs/paper/smollm2/in_domain_mixed/$task"
done
