#!/usr/bin/env bash
# Writes experiments/smollm2/further_texts: 10,429 answers of SmolLM2 (1.03 million tokens):
# samples at temperature 0.7 of the
# prompts that more_texts.sh leaves, and greedy, sampled and continued texts of a second draw
# of prompts. The prompts of the second draw that experiments/smollm2/texts answers are
# skipped, of those that are not sampled also what more_texts answers.
#
#   experiments/smollm2/further_texts.sh DATA
#
# DATA is a folder of public data sets as JSON Lines (training_prompts.py).
#
#   needs    two cores with AVX-512 and VNNI, 4 GB of memory and about an hour
#   makes    runs/smollm2/further/{first,second,texts}
set -euo pipefail
data=$(realpath "${1:?give the folder of data sets}")
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
further=runs/smollm2/further

"$python" experiments/smollm2/training_prompts.py --data="$data" --output="$further/first"
split -d -l 1950 --additional-suffix=.jsonl "$further/first/sampled.jsonl" "$further/first/s_"
"$python" experiments/smollm2/training_prompts.py --data="$data" --seed=1 \
    --output="$further/second"
# Parts of 1,200 prompts: of tasks (t), instructions (i), and 190 passages to continue (p).
"$python" - "$further/second" <<'PYTHON'
import json, pathlib, random, sys

folder = pathlib.Path(sys.argv[1])
read = lambda name: [json.loads(x) for x in (folder / f"{name}.jsonl").open()]
chat, plain = read("greedy") + read("sampled"), read("plain")
of_tasks = [x for x in chat if x["kind"] != "instructions"]
instructions = [x for x in chat if x["kind"] == "instructions"]
random.Random(1).shuffle(of_tasks)
random.Random(2).shuffle(instructions)
for part in range(3):
    for name, prompts, size in ("t", of_tasks, 1200), ("i", instructions, 1200), ("p", plain, 190):
        some = prompts[part * size : (part + 1) * size]
        lines = "".join(json.dumps(x) + "\n" for x in some)
        (folder / f"{name}_{part:02}.jsonl").write_text(lines)
PYTHON

parts=(first/s_{01,02,03} second/{t,i,p}_00 second/{t,i,p}_01 second/{t,i,p}_02)
for part in "${parts[@]}"; do
    flags=(--answered=experiments/smollm2/texts)
    case $part in
        */s_* | */i_*) flags+=(--temperature=0.7) ;;
        */p_*) flags+=(--nochat --answered=experiments/smollm2/more_texts) ;;
        *) flags+=(--answered=experiments/smollm2/more_texts) ;;
    esac
    "$python" -m bpd_jax.distill --model=smollm2 --precision=int8 --batch_size=64 \
        --prompts_file="$further/$part.jsonl" --max_new_tokens=128 --longest_prompt=448 \
        --output="$further/texts/$(basename "$part")" "${flags[@]}"
done
names=("${parts[@]##*/}")
"$python" experiments/smollm2/pack_texts.py --output="$further/texts/all" \
    "${names[@]/#/$further/texts/}"
