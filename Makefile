# Every target sets itself up from a fresh clone: it needs make and Python >= 3.11 with pip, nothing else.

PYTHON ?= python3
RECIPE ?= vapo
SEED ?= 0
# Tensor-parallel size of `make demo`; empty: what the demo's config says.
TP ?=
# Rollout engine of `make demo`: transformers or sglang.
ENGINE ?= transformers
# Test processes. Tests start ranks of their own, one thread each: two of them keep two cores busy.
JOBS ?= 2
# More arguments for megarl (demo), pytest (test, test-slow) or benchmarks/step.py (bench).
ARGS ?=
# Benchmarks of `make bench`; empty: all of them.
BENCH ?=
# Ranks of `make rehearse-scale`.
RANKS ?= 128
# Where the CPU build of torch is. Where this index is out of reach, pip takes what its other sources offer.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
SGLANG := .venv-sglang
LAUNCH := .venv-launch
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SOURCES := megarl tests benchmarks $(wildcard tools)
PYTEST := $(BIN)/python -m pytest

export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow test-sglang test-slurm test-launch chaos rehearse-scale lint types format trl bench gpu gpu-tests gpu-bench ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## .venv with megarl and its development tools, pinned by constraints-cpu.txt

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Makefile: $(PYTHON) is older than Python 3.11 (set PYTHON=python3.11)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: only this one package is asked of its index, and the CPU build is 200 MB where CUDA's is several GB.
	$(BIN)/python -m pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e '.[dev]'
	@touch $@

ifeq ($(ENGINE),sglang)
# One rank and one engine: with the config's two ranks there would be two engines, of three processes each.
demo: $(SGLANG)/installed
	$(SGLANG)/bin/megarl demo --recipe $(RECIPE) --seed $(SEED) rollout.engine=sglang parallel.tp=$(or $(TP),1) $(ARGS)
else
demo: $(STAMP) ## a tiny model learns multi-step addition: RECIPE=vapo|dapo SEED=0 TP=2 ENGINE=sglang
	$(BIN)/megarl demo --recipe $(RECIPE) --seed $(SEED) rollout.engine=$(ENGINE) $(if $(TP),parallel.tp=$(TP)) $(ARGS)
endif

test: $(STAMP) ## the fast tests: JOBS=2, ARGS='-k name'
	$(PYTEST) -m 'not slow' -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(STAMP) ## the tests that take longer, one after the other
	$(PYTEST) -m slow --ignore=tests/slurm $(ARGS)

chaos: $(STAMP) ## faults from outside in every phase, and a table of how runs survive them: ARGS='rollout SIGTERM'
	$(BIN)/python -m tests.chaos.run $(ARGS)

rehearse-scale: $(STAMP) ## a VAPO run at a large layout with real ranks, one killed, continued (docs/scale.md): RANKS=8|32|64|128
	$(BIN)/python -m tests.scale.rehearse $(RANKS)

test-sglang: $(SGLANG)/installed ## the tests on a real SGLang engine, in an environment of their own (.venv-sglang, 3 GB)
	$(SGLANG)/bin/python -m pytest tests/sglang $(ARGS)

test-slurm: $(STAMP) ## the tests on a real Slurm of two virtual nodes, from the system's packages (as root)
	bash tests/slurm/install.sh
	$(PYTEST) tests/slurm $(ARGS)

test-launch: $(LAUNCH)/installed ## the tests of tools/launch.py on NeMo-Run, in an environment of their own (.venv-launch, 1.5 GB)
	bash tests/slurm/install.sh
	$(LAUNCH)/bin/python -m pytest tests/launch $(ARGS)

$(LAUNCH)/installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(LAUNCH)
	$(LAUNCH)/bin/python -m pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints-cpu.txt torch
	$(LAUNCH)/bin/python -m pip install --quiet -c constraints-cpu.txt -e '.[dev,launch]'
	@touch $@

$(SGLANG)/installed: pyproject.toml constraints-cpu.txt requirements-sglang-cpu.txt
	$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints-cpu.txt torch
	$(SGLANG)/bin/python -m pip install --quiet -c constraints-cpu.txt -e '.[dev]'
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r requirements-sglang-cpu.txt
	@touch $@

lint: $(STAMP) ## ruff (rules and format) and the floors of docs/design.md
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports

types: $(STAMP) ## mypy
	$(BIN)/mypy

format: $(STAMP) ## ruff, writing what it can mend
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

trl: .venv-trl/installed ## .venv-trl with TRL, the yardstick of `make bench BENCH=step ARGS='--vs trl'`

.venv-trl/installed: benchmarks/trl_requirements.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --no-deps --retries 1 --extra-index-url $(TORCH_INDEX) -c benchmarks/trl_requirements.txt torch
	.venv-trl/bin/python -m pip install --quiet -r benchmarks/trl_requirements.txt
	@touch $@

bench: $(STAMP) ## every benchmark with its target, 20 minutes: BENCH='step gae', ARGS='--vs trl' (for step)
	$(BIN)/python benchmarks/run.py --only $(BENCH) $(if $(ARGS),-- $(ARGS))

gpu: gpu-tests gpu-bench ## tests and figures on one GPU, with the Python that is given: PYTHON=python3 (docs/gpu.md)

gpu-tests:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m pytest tests/gpu -m gpu -s $(ARGS)

gpu-bench:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/gpu.py $(ARGS)

ci: ## what CI runs
	bash .ci/run

clean: ## removes all environments and what builds and tests left; runs/ stays
	rm -rf $(VENV) $(SGLANG) $(LAUNCH) .venv-trl build dist megarl.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
