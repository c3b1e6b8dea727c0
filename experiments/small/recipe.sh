#!/usr/bin/env bash
# The paper's experiment at the size `small`: a model with nine heads trained jointly from
# scratch, rescorers and n-grams of the same text, finetuning, every table and figure.
#
#   bash experiments/small/recipe.sh TEXT DATA [STAGE…]
#
# TEXT is a glob of text files or of JSON Lines with the field `text`. DATA contains the
# tasks as JSON Lines, DATA/NAME/SPLIT.jsonl.gz (docs/data.md). Tasks without a training
# split use the model that is finetuned on CNN/DailyMail, which also summarises news.
# By default all stages run, in this order:
#
#   rows        the vocabulary, and the rows of tokens
#   pretrain    the model with its heads
#   rescorers   three language models without heads
#   ngrams      2-, 3- and 4-gram Katz models with the paper's minimum counts
#   finetune    the model on each task
#   in_domain   the rescorer `deep` on each task
#   studies     tunes α for each task, then measures all tables and figures
#   report      one page of all results
#
# The stage `pretrained`, in place of `pretrain`, uses the committed model of
# experiments/small/model, with which the committed results were made:
#
#   bash experiments/small/recipe.sh TEXT DATA rows pretrained rescorers ngrams finetune \
#       in_domain studies report
#
# The same command resumes: finished stages are skipped, and training and studies resume
# where they stopped. For a low priority: nice -n 19 bash experiments/small/recipe.sh …
#
# The variables PRETRAIN, FINETUNE and STUDIES hold further flags of these stages, such as
# PRETRAIN=--gin.STEPS=200.
#
#   needs    8 GB of memory, 4 GB of disk
#   makes    runs/small/training/NAME (runs), runs/small/NAME (models), runs/small/studies
#            (records), runs/small/report.html
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
run=runs/small
text="${1:?give a glob of text files}"
data="${2:?give a folder of tasks}"
shift 2
stages=("$@")
[ ${#stages[@]} -gt 0 ] ||
    stages=(rows pretrain rescorers ngrams finetune in_domain studies report)
# Flags must not contain spaces.
read -ra more_pretrain <<< "${PRETRAIN:-}"
read -ra more_finetune <<< "${FINETUNE:-}"
read -ra more_studies <<< "${STUDIES:-}"

base="$run/training/base"
tasks=(cnn_dailymail squad samsum multi_news xsum newsroom)
# Differences from gin_configs/models/rescorer_small.gin.
shallow=(--gin.TransformerConfig.num_layers=2)
deep=()
wide=(--gin.TransformerConfig.num_layers=6 --gin.TransformerConfig.d_model=128
    --gin.TransformerConfig.d_ff=512 --gin.TransformerConfig.num_heads=4)

# finished FILE: succeeds, with a message, if FILE exists.
finished() {
    [ -e "$1" ] && echo "finished: $(dirname "$1")"
}

# export_model RUN NAME: exports the best parameters of a run, for decoding in float32.
export_model() {
    "$python" -m bpd_jax.export_params --model="$1" --output="$run/$2" --dtype=float32 \
        --precision=float32
}

# finetune START NAME TASK FLAGS…: the run training/NAME, exported as NAME.
finetune() {
    local start=$1 name=$2 task=$3
    shift 3
    local train="$data/$task/train.jsonl.gz" flags=()
    finished "$run/$name/slim.json" && return
    if [ ! -e "$train" ]; then
        echo "$task has no $train: $run/$name is $run/${name/$task/cnn_dailymail}"
        ln -s "${name/$task/cnn_dailymail}" "$run/$name"
        return
    fi
    # The evaluation split must not select the checkpoint.
    [ -e "$data/$task/test.jsonl.gz" ] ||
        flags+=(--gin.ExampleTask.validation_from="'train'")
    local count
    count=$(zcat "$train" | wc -l)
    [ "$count" -ge 1000 ] ||
        flags+=(--gin.STEPS=$((4 * count)) --gin.WARMUP_STEPS=10
            --gin.TrainConfig.evaluate_every=$((count / 4 + 1))
            --gin.ExampleTask.validation_fraction=0.2)
    "$python" -m bpd_jax.train --gin_file=experiments/small/finetune.gin \
        --gin_file="gin_configs/tasks/$task.gin" --gin.START="'$run/training/$start'" \
        --gin.ExampleTask.files="'$data/$task/{split}.jsonl.gz'" "${flags[@]}" "$@" \
        "${more_finetune[@]}" --workdir="$run/training/$name"
    export_model "$run/training/$name" "$name"
}

stage_rows() {
    local split
    for split in train validation; do
        finished "$base/data/$split/rows.json" ||
            "$python" -m bpd_jax.prepare --task=text_files --files="$text" --length=512 \
                --vocabulary=bpe:8192 --split="$split" --output="$base/data/$split"
    done
}

stage_pretrain() {
    finished "$run/lambada/slim.json" && return
    "$python" -m bpd_jax.train --gin_file=experiments/small/pretrain.gin \
        --gin.TEXT_FILES="'$text'" "${more_pretrain[@]}" --workdir="$base"
    export_model "$base" lambada
}

stage_pretrained() {
    finished "$run/lambada/slim.json" && return
    if [ -e "$base/checkpoints" ]; then
        echo "$base holds a training run: use the stage pretrain, or move it" >&2
        exit 1
    fi
    mkdir -p "$base"
    cp experiments/small/model/* "$base"
    export_model "$base" lambada
}

stage_rescorers() {
    local name
    for name in shallow deep wide; do
        finished "$run/$name/slim.json" && continue
        local -n shape=$name
        mkdir -p "$run/training/$name"
        [ -e "$run/training/$name/data" ] || ln -s ../base/data "$run/training/$name/data"
        "$python" -m bpd_jax.train --gin_file=experiments/small/pretrain.gin \
            --gin_file=gin_configs/models/rescorer_small.gin "${shape[@]}" \
            --gin.LEARNING_RATE=4e-3 --gin.STEPS=2000 --gin.TEXT_FILES="'$text'" \
            --gin.TrainConfig.head_weights=None \
            "${more_pretrain[@]}" --workdir="$run/training/$name"
        export_model "$run/training/$name" "$name"
    done
}

stage_ngrams() {
    local order counts=1,1,2,4
    for order in 2 3 4; do
        finished "$run/${order}gram/ngram_model.json" ||
            "$python" -m bpd_jax.build_ngram --text="$text" --split=train --order="$order" \
                --min_counts="${counts:0:$((2 * order - 1))}" --vocabulary="$base" \
                --output="$run/${order}gram"
    done
}

stage_finetune() {
    local task
    for task in "${tasks[@]}"; do
        finetune base "$task" "$task"
    done
}

stage_in_domain() {
    local task
    for task in "${tasks[@]}"; do
        finetune deep "deep_$task" "$task" \
            --gin_file=gin_configs/models/rescorer_small.gin --gin.STEPS=250
    done
}

stage_studies() {
    "$python" -m experiments.run all --size=small --data="$data" --workdir="$run/studies" \
        "${more_studies[@]}"
}

stage_report() {
    "$python" -m bpd_jax.report "$run/studies" --output="$run/report.html"
}

for stage in "${stages[@]}"; do
    if ! declare -F "stage_$stage" > /dev/null; then
        echo "there is no stage $stage" >&2
        exit 2
    fi
    printf '\n== %s, %s\n' "$stage" "$(date -u '+%F %T UTC')"
    "stage_$stage"
done
