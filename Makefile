# Every target sets itself up from a fresh clone: it needs make and Python >= 3.11 with pip, nothing else.

PYTHON ?= python3
RECIPE ?= vapo
SEED ?= 0
# Tensor-parallel size of `make demo`; empty: what the demo's config says.
TP ?=
# Test processes. Tests start ranks of their own, one thread each: two of them keep two cores busy.
JOBS ?= 2
# More arguments for megarl (demo), pytest (test, test-slow) or benchmarks/step.py (bench).
ARGS ?=
# Where the CPU build of torch is. Where this index is out of reach, pip takes what its other sources offer.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SOURCES := megarl tests benchmarks $(wildcard tools)
PYTEST := $(BIN)/python -m pytest

export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint types format trl bench ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## .venv with megarl and its development tools, pinned by constraints-cpu.txt

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Makefile: $(PYTHON) is older than Python 3.11 (set PYTHON=python3.11)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: only this one package is asked of its index, and the CPU build is 200 MB where CUDA's is several GB.
	$(BIN)/python -m pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## a tiny model learns multi-step addition: RECIPE=vapo|dapo SEED=0 TP=2
	$(BIN)/megarl demo --recipe $(RECIPE) --seed $(SEED) $(if $(TP),parallel.tp=$(TP)) $(ARGS)

test: $(STAMP) ## the fast tests: JOBS=2, ARGS='-k name'
	$(PYTEST) -m 'not slow' -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(STAMP) ## the tests that take longer, one after the other
	$(PYTEST) -m slow $(ARGS)

lint: $(STAMP) ## ruff (rules and format) and the floors of docs/design.md
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports

types: $(STAMP) ## mypy
	$(BIN)/mypy

format: $(STAMP) ## ruff, writing what it can mend
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

trl: .venv-trl/installed ## .venv-trl with TRL, the yardstick of `make bench ARGS='--vs trl'`

.venv-trl/installed: benchmarks/trl_requirements.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c benchmarks/trl_requirements.txt torch
	.venv-trl/bin/python -m pip install --quiet -r benchmarks/trl_requirements.txt
	@touch $@

bench: $(STAMP) ## seconds and tokens/s of each phase of a step: ARGS='--vs trl'
	$(BIN)/python benchmarks/step.py $(ARGS)

ci: ## what CI runs
	bash .ci/run

clean: ## removes both environments and what builds and tests left; runs/ stays
	rm -rf $(VENV) .venv-trl build dist megarl.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
