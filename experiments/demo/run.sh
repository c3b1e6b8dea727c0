#!/usr/bin/env bash
# Trains a model and an n-gram model, evaluates and decodes; `make train-demo` runs it.
#
#   paper    sections 4, 6.3 and 7.2, at a size for two CPU cores
#   needs    only the environment: the corpus is Python's standard library
#   takes    six to eight minutes on two cores
#   shows    block efficiency: oracle > tree > 16-best 3-gram > BPD > 1.2, outputs
#            identical
#
# Trigrams, because the output of so small a model is simpler than the corpus: 4-grams of
# the corpus make its drafts worse.
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON_BIN:-.venv/bin/python}"
run="${RUN:-runs/demo}"

step() {
    printf '\n\033[1m$ python'
    printf ' %q' "$@"
    printf '\033[0m\n'
    "$python" "$@"
}

step -m bpd_jax.train --gin_file=experiments/demo/demo.gin --workdir="$run"
step -m bpd_jax.build_ngram --task=stdlib --vocabulary="$run" --order=3 \
    --min_counts=1,1,2 --max_bytes=8000000 --heldout_split=validation \
    --output="$run/ngram"
step -m bpd_jax.evaluate --model="$run" --max_new_tokens=96 \
    --title="Blockwise parallel decoding of Python source"
step -m bpd_jax.decode --model="$run" --method=ngram:16 --max_new_tokens=40 \
    --show_steps --prompt=$'def main():\n    parser = argparse.ArgumentParser('
