# Everything runs inside .venv, which `setup` makes; nothing has to be installed or exported by hand.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

ifneq (1,$(words $(CURDIR)))
$(error make cannot handle the space in '$(CURDIR)': put the clone into another folder)
endif

PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
# CMake finds ninja on the path.
CMAKE := PATH="$(BIN):$$PATH" $(BIN)/cmake
CTEST := PATH="$(BIN):$$PATH" $(BIN)/ctest -j $(shell nproc)
# Several processes at once. With all cores each, they would only wait for each other.
WORKERS := $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))
PYTEST := OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
CXX_FILES = $$(find include src bindings tests/cpp tests/fuzz examples benchmarks lab \
	-name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu')

.PHONY: help setup build lint format test test-core test-sanitize test-compat mutants bench fuzz-calls gpu \
	PARTS gpu-summary gpu-soak clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup: .venv/ready  ## create .venv with all dependencies, once
.venv/ready: requirements-dev.txt tools/setup.sh
	@PYTHON="$(PYTHON)" tools/setup.sh

build: setup  ## set up and build; then .venv/bin/python and .venv/bin/fusewise work
	$(CMAKE) --preset dev -DPython_EXECUTABLE=$(BIN)/python
	$(CMAKE) --build --preset dev

lint: setup  ## check format and style, change nothing
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## format all code
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint build test-core  ## lint, Python tests, and the core with its C++ tests
	$(PYTEST)

test-core: setup  ## build, test, install and use the C++ core without Python and torch
	$(CMAKE) --preset core
	$(CMAKE) --build --preset core
	$(CTEST) --preset core
	$(CMAKE) --install build/core
	$(CMAKE) -S examples/cpp -B build/example -G Ninja -DCMAKE_PREFIX_PATH=$(CURDIR)/build/install
	$(CMAKE) --build build/example
	build/example/squeeze_excite

test-sanitize: setup  ## run the core's tests under ASan and UBSan, then fuzz for a minute
	$(CMAKE) --preset sanitize
	$(CMAKE) --build --preset sanitize
	ASAN_OPTIONS=allocator_may_return_null=1 $(CTEST) --preset sanitize  # as malloc would
	tools/fuzz.sh 60

test-compat: build  ## test the built library under the newest torch, and a clean `pip install .`
	@PYTHON="$(PYTHON)" tools/compat.sh

bench: build  ## measure against PyTorch; ARGS="--full --device cpu" and the like are passed on
	$(BIN)/fusewise bench $(ARGS)

fuzz-calls: build  ## check random calls of the operators but LINet's; ARGS="mlp --seed 1" and the like are passed on
	$(BIN)/python tools/fuzz_calls.py $(ARGS)

# With the python3 on the path where that has the right torch (nothing is installed), else .venv.
mutants gpu gpu-soak: any_python = $$(python3 tools/has_torch.py && echo python3 || echo $(BIN)/python)
mutants:  ## plant small bugs one at a time, which a test must find; ARGS="--jobs 4 linear_act" picks some
	@python3 tools/has_torch.py || $(MAKE) setup
	$(any_python) tools/mutants.py $(ARGS)

gpu:  ## on a GPU: build, test, sanitize, fuzz and measure; `make gpu PARTS` lists the parts, PART="a b" picks some, AGAIN=1 repeats those that passed
ifeq (,$(filter PARTS,$(MAKECMDGOALS)))
	@python3 tools/has_torch.py || $(MAKE) setup
	$(any_python) tools/gpu.py $(PART) $(if $(AGAIN),--again) --commit="$(COMMIT)" --bench="$(ARGS)"
else
	@:
endif

PARTS:
	@python3 tools/gpu.py --list

gpu-summary:  ## merge the records of all parts into gpu-results/summary.md; FROM="folder ..." reads them elsewhere
	@python3 tools/gpu.py --summary $(FROM)

gpu-soak:  ## on a GPU, after `make gpu`: a million calls, during which memory must not grow
	PYTHONPATH="python:$${PYTHONPATH:-}" $(any_python) tools/soak.py

clean:  ## remove build and result folders; .venv stays
	rm -rf build dist bench-results gpu-results optimize-results profile-results python/fusewise/_lib/*.so
