#!/usr/bin/env bash
# Trains the heads and the rescorer in bpd_jax/shipped/smollm2 and what the studies of size
# smollm2_heads compare, from texts of a mix with the paper's seven tasks (about equally many
# of each in the first folder).
#
#   experiments/smollm2/equal_shares.sh CORPUS [DATA]
#
# CORPUS is a glob of JSON Lines with the field `text`. The texts, 32,001 answers of
# SmolLM2, are in experiments/smollm2/{texts,more_texts,further_texts}; with DATA, a folder of
# public data sets as JSON Lines (training_prompts.py), those of the first are written again.
# Heads and n-grams are of all three, the rescorer of the first two.
#
#   needs    two cores, 8 GB of memory and eight hours, or a GPU
#   makes    runs/smollm2/equal/{texts,states,own_2,own_4,all_texts},
#            runs/smollm2/{three,heads,rescorer,general_2,general_4}, which `--model=smollm2` and
#            the studies use; runs/smollm2/training, the runs of the rescorer
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
run=runs/smollm2
equal=$run/equal
corpus="${1:?give a glob of JSON Lines}"
texts=experiments/smollm2/texts

if [ $# -gt 1 ]; then
    "$python" experiments/smollm2/training_prompts.py --data="$2" --scale=0.25 \
        --output="$equal/prompts"
    # 400 of the prompts that are to be sampled from.
    sed -i '401,$d' "$equal/prompts/sampled.jsonl"
    for part in greedy plain sampled; do
        flags=()
        [ $part = sampled ] && flags=(--temperature=0.7)
        [ $part = plain ] && flags=(--nochat)
        "$python" -m bpd_jax.distill --model=smollm2 --precision=int8 --batch_size=64 \
            --prompts_file="$equal/prompts/$part.jsonl" --max_new_tokens=128 \
            --longest_prompt=448 --output="$equal/texts/$part" "${flags[@]}"
    done
    texts=$equal/texts/all
    "$python" experiments/smollm2/pack_texts.py --output="$texts" \
        "$equal"/texts/{greedy,plain,sampled}
fi

"$python" experiments/smollm2/pack_texts.py --output="$run/three" "$texts" \
    experiments/smollm2/{more_texts,further_texts}
"$python" -m bpd_jax.train --gin_file=experiments/smollm2/heads.gin \
    --gin.DATA="'$run/three'" --gin.HeadsTrainConfig.states="'$equal/states'" \
    --workdir="$run"

"$python" experiments/smollm2/pack_texts.py --output="$equal/all_texts" "$texts" \
    experiments/smollm2/more_texts
train_rescorer() {
    "$python" -m bpd_jax.train --gin_file=experiments/smollm2/rescorer.gin \
        --gin.TEXT_FILES="'$equal/all_texts'" --workdir="$run/training/$1" "${@:3}"
    "$python" -m bpd_jax.export_params --model="$run/training/$1" --precision=float32 \
        --dtype=compact --output="$2"
}
train_rescorer rescorer "$equal/rescorer" --gin.STEPS=10000 \
    --gin.TrainConfig.evaluate_every=1000
# Further steps from the weights as they are stored, for which the coarse ones cost less.
train_rescorer rescorer_stored "$run/rescorer" \
    --gin.TrainConfig.start="'$equal/rescorer'" --gin.LEARNING_RATE=6e-4 \
    --gin.WARMUP_STEPS=30

for order in 2 4; do
    "$python" -m bpd_jax.build_ngram --generations="$run/three" --answers_only --split=all \
        --order=$order --output="$equal/own_$order"
    counts=1,1
    [ $order = 4 ] && counts=1,1,2,4
    "$python" -m bpd_jax.build_ngram --text="$corpus" --order=$order --min_counts=$counts \
        --max_ngrams=4000000 --vocabulary=bpd_jax/shipped/smollm2/rescorer \
        --output="$run/general_$order"
done

# N-grams of each task, interpolated with unigrams of the corpus, once table7 has run.
for ngram in runs/paper/smollm2*/in_domain/*; do
    [ -e "$ngram" ] || break
    mixed="${ngram/in_domain/in_domain_mixed}"
    "$python" -m bpd_jax.build_ngram --model="$ngram" --unigrams="$run/general_2" \
        --output="$mixed"
done
