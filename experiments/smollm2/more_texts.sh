#!/usr/bin/env bash
# Writes experiments/smollm2/more_texts: 16,034 answers of SmolLM2 (1.58 million tokens) to
# further prompts of the mix in experiments/smollm2/texts, of which the shipped rescorer is
# trained. Both folders together have 2.13 million tokens of answers.
#
#   experiments/smollm2/more_texts.sh DATA
#
# DATA is a folder of public data sets as JSON Lines (training_prompts.py). About 2,800 of
# the texts were written when the cache of --precision=int8 had 32 bits per number, so that
# some of them differ from what this command writes now.
#
#   needs    two cores with AVX-512 and VNNI, 4 GB of memory and about an hour
#   makes    runs/smollm2/more/{prompts,texts}
set -euo pipefail
data=$(realpath "${1:?give the folder of data sets}")
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
more=runs/smollm2/more

"$python" experiments/smollm2/training_prompts.py --data="$data" --output="$more/prompts"
# The prompts are in random order, so that every part has the same mix.
split -d -l 2350 --additional-suffix=.jsonl "$more/prompts/greedy.jsonl" "$more/prompts/g_"
split -d -l 1950 --additional-suffix=.jsonl "$more/prompts/sampled.jsonl" "$more/prompts/s_"
parts=(g_00 g_01 g_02 g_03 g_04 g_05 g_06 plain s_00)
for part in "${parts[@]}"; do
    flags=()
    [ "$part" = s_00 ] && flags=(--temperature=0.7)
    [ "$part" = plain ] && flags=(--nochat)
    "$python" -m bpd_jax.distill --model=smollm2 --precision=int8 --batch_size=64 \
        --prompts_file="$more/prompts/$part.jsonl" --max_new_tokens=128 \
        --longest_prompt=448 --answered=experiments/smollm2/texts \
        --output="$more/texts/$part" "${flags[@]}"
done
"$python" experiments/smollm2/pack_texts.py --output="$more/texts/all" \
    "${parts[@]/#/$more/texts/}"
