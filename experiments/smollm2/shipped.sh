#!/usr/bin/env bash
# Trains the drafter, the n-gram model and the rescorer in bpd_jax/shipped/smollm2.
#
#   experiments/smollm2/shipped.sh FOLDER
#
# FOLDER contains public data sets as JSON Lines; see training_prompts.py. The prompts have
# equal numbers for each of the paper's seven tasks now. Those of the shipped files were written by
# that script at commit 99029e0: instructions, 10,000 passages of a corpus, 4,500 questions
# of GSM8K, 4,000 of SQuAD, 3,500 dialogues of SAMSum and 200 articles of CNN/DailyMail at
# most, none of MultiNews, XSum, NewsRoom and LAMBADA. With that version of the script, whose
# greedy.jsonl has the same form, this file repeats their training. The first two stages of
# the shipped drafter, and the rescorer, were trained on other texts, of which one in six
# was sampled; the third stage also trained a confidence head, which was removed.
#
#   needs    two cores, 24 GB of memory, 30 GB of disk and a day, or a GPU
#   makes    runs/smollm2/{texts,states,drafter,ngram,rescorer}, which `--model=smollm2`
#            then uses instead of the shipped ones, and the run folders
#            runs/smollm2/{stage1,stage2,training/rescorer}
set -euo pipefail
data=$(realpath "$1")
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
run=runs/smollm2

"$python" experiments/smollm2/training_prompts.py --data="$data" --output="$run/prompts/equal"
"$python" -m bpd_jax.distill --model=smollm2 --prompts_file="$run/prompts/equal/greedy.jsonl" \
    --max_new_tokens=192 --longest_prompt=320 --batch_size=64 --output="$run/texts" \
    --states="$run/states" --feature_layers=2,15,28 --states_dtype=bfloat16

train() {
    "$python" -m bpd_jax.train --gin_file=experiments/smollm2/drafter.gin \
        --gin.HeadsTrainConfig.states="'$run/states'" --workdir="$run/$1" \
        --gin.HeadsTrainConfig.evaluate_every=1000 "${@:2}"
}
train stage1 --gin.HeadsTrainConfig.train_texts=4736 --gin.EPOCHS=2.4
train stage2 --gin.HeadsTrainConfig.start="'$run/stage1/drafter'" \
    --gin.LEARNING_RATE=6e-4 --gin.HeadsTrainConfig.steps=13000
train drafter --gin.HeadsTrainConfig.start="'$run/stage2/drafter'" \
    --gin.LEARNING_RATE=6e-4 --gin.HeadsTrainConfig.steps=21000 \
    --gin.DRAFT_VOCABULARY=16384

"$python" -m bpd_jax.build_ngram --generations="$run/texts" --answers_only \
    --heldout_split=validation --max_ngrams=500000 --order=4 --compact --output="$run/ngram"
"$python" -m bpd_jax.train --gin_file=experiments/smollm2/rescorer.gin \
    --workdir="$run/training/rescorer"
"$python" -m bpd_jax.export_params --model="$run/training/rescorer" --precision=float32 \
    --dtype=compact --output="$run/rescorer"
