# All commands use .venv, which the first one creates; compilers and docs have separate ones.
SHELL := /bin/bash
BIN := .venv/bin
# Of three processes of tests, one usually waits for the processes that it started.
JOBS ?= 3
# Bytecode is cached, even if the environment disables it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help env demo train-demo docs docs-serve tpu-compile tpu-test gpu-compile \
  gpu-test gpu-check tpu-check gpu-bundle test test-defaults test-all lint format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

env: ## create .venv, once; PYTHON=/path/to/python3.12 selects the Python
	@PYTHON="$(PYTHON)" bash scripts/env.sh

demo: env ## SmolLM2 answers prompts with several methods; table, drafts, report
	@bash experiments/smollm2/demo.sh

train-demo: env ## train a small model from scratch, n-grams too, decode, write a report
	@bash experiments/demo/run.sh

# Suppresses an announcement that mkdocs-material prints at every start.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs
docs: ## the site of docs/ into site/, in .venv-docs; open site/index.html
	@PYTHON="$(PYTHON)" bash scripts/docs_env.sh
	$(MKDOCS) build --strict --quiet

docs-serve: ## the same on localhost:8000, rebuilt when a page changes
	@PYTHON="$(PYTHON)" bash scripts/docs_env.sh
	$(MKDOCS) serve --watch bpd_jax

TOPOLOGY ?= v4:4x4x4
MESH ?= v4_128
tpu-compile: ## the paper's training step through the TPU compiler, in .venv-tpu; no TPU
	@PYTHON="$(PYTHON)" bash scripts/compile_env.sh tpu
	.venv-tpu/bin/python -m bpd_jax.compile --topology=$(TOPOLOGY) \
	  --gin_file=gin_configs/runs/pretrain.gin --gin_file=gin_configs/meshes/$(MESH).gin \
	  --output=runs/tpu_compile.json

GPUS ?= h100:8
GPU_MESH ?= gpu_8
gpu-compile: ## the same through XLA's compiler for GPUS=h100:8, in .venv-gpu; no GPU
	@PYTHON="$(PYTHON)" bash scripts/compile_env.sh gpu
	.venv-gpu/bin/python -m bpd_jax.compile --topology=$(GPUS) \
	  --gin_file=gin_configs/runs/pretrain.gin --gin_file=gin_configs/meshes/$(GPU_MESH).gin \
	  --output=runs/gpu_compile.json

tpu-test: ## the tests that need the TPU compiler, in .venv-tpu
	@PYTHON="$(PYTHON)" bash scripts/compile_env.sh tpu
	.venv-tpu/bin/python -m pip install --disable-pip-version-check --quiet \
	  --constraint requirements.txt pytest
	.venv-tpu/bin/python -m pytest tests/compilation

gpu-test: ## the tests that need the GPU compiler, in .venv-gpu
	@PYTHON="$(PYTHON)" bash scripts/compile_env.sh gpu
	.venv-gpu/bin/python -m pip install --disable-pip-version-check --quiet \
	  --constraint requirements.txt pytest
	.venv-gpu/bin/python -m pytest tests/compilation

# These run in the environment of the host, which needs neither TensorFlow nor a network.
PARTS ?= attention,lossless,plain,costs,smollm2,training,joint
CHECK = $(or $(PYTHON),python3) -m benchmarks.accelerator --part=$(PARTS) $(FLAGS)
gpu-check: ## measure a GPU, in 14 minutes at most; PARTS=plain for a part, FLAGS=--missing
	$(CHECK) --platform=gpu

tpu-check: ## the same for the TPUs of this host
	$(CHECK) --platform=tpu

PART ?= 1
gpu-bundle: env ## the check in a folder of 55 MiB, for a machine without a network; PART=2
	$(BIN)/python -m benchmarks.bundle --part=$(PART) --output=build/gpu_bundle_$(PART)

# Whole files, as fixtures of a file may train; tests/conftest.py orders the files.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: lint ## lint, then the tests on JOBS=3 processes
	$(PYTEST) -m "not exhaustive"

# `make test` compiles quickly, for AVX2; this for the processor, as users do.
BITS := single_tokens or integer_products
test-defaults: env ## that drafts change no bit with XLA's default flags, on this processor
	$(PYTEST) --xla-defaults -m "not exhaustive" -k "$(BITS)" \
	  tests/cpu/layer_loop_test.py tests/cpu/attention_kernel_test.py \
	  tests/decoding/lossless_test.py

test-all: lint ## the same with slow tests, every case of each matrix, and shapes checked
	$(PYTEST)
	$(PYTEST) --shapes -m "not exhaustive" tests/models tests/drafting tests/decoding \
	  tests/training/{cross_entropy,drafter_blocks,levels_loss,loss,refiner_sources,refiners}_test.py

lint: env ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env ## format with ruff and apply its fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## delete caches, build products and what killed processes left
	rm -rf build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path "./.venv*" -prune -o -name __pycache__ -type d -exec rm -rf {} +
	find . -path "./.venv*" -prune -o -name ".bpd_jax-*.part" -exec rm -rf {} +
