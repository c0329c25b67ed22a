# Every command of the project. `make` alone prints this help.
# `make run` and `make test` work on a fresh machine and need nothing before them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= models/demo
ARGS   ?=
PROTOS := $(wildcard protos/orcinus/v1/*.proto)
SOURCES := services kernels benchmarks examples models tests

.DEFAULT_GOAL := help
.PHONY: help setup constraints protos run test test-system test-gpu check fmt fmt-check lint types layers bench demo-model clean

help:  ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Using it

setup: $(VENV)/.installed  ## Make the virtual environment in .venv, with everything in it

run: setup  ## Serve MODEL (models/demo) on this machine; ARGS="--stages 2 …" goes to services.local
	@exec $(BIN)/python -m services.local --model $(MODEL) $(ARGS)

##@ Changing it

test: setup  ## Run the tests; ARGS goes to pytest
	$(BIN)/python -m pytest $(ARGS)

test-system: setup  ## Run only the tests of whole processes
	$(BIN)/python -m pytest -m system $(ARGS)

test-gpu: setup  ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: fmt-check lint types layers test  ## What CI runs: format, lint, types, layers, tests

fmt: setup  ## Format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

fmt-check: setup
	$(BIN)/ruff format --check $(SOURCES)

lint: setup  ## Lint code and protos
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/buf lint

types: setup  ## Check the types, strictly
	$(BIN)/mypy

layers: setup  ## Check that imports point one way
	$(BIN)/lint-imports --no-cache

bench: setup  ## Measure the control plane and the scheduler against their budgets
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.control_plane

demo-model: setup  ## Train models/demo anew; ARGS="--minutes N"
	$(BIN)/python models/train_demo.py --out models/demo $(ARGS)

##@ Generated

protos: $(VENV)/.protos  ## Generate the code of the wire contracts into protos/gen

constraints: setup  ## Write what is installed into constraints.txt
	@{ sed -n 1p constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/^torch==\([0-9.]*\)+.*/torch==\1/' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## Remove everything that can be made again
	rm -rf $(VENV) protos/gen *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Orcinus needs Python 3.11 or newer; set PYTHON=…") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.protos: $(PROTOS) constraints.txt | $(BIN)/python
	@$(BIN)/python -c 'import grpc_tools' 2>/dev/null || $(BIN)/pip install --quiet -c constraints.txt grpcio-tools
	rm -rf protos/gen && mkdir -p protos/gen
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos/gen --pyi_out=protos/gen --grpc_python_out=protos/gen $(PROTOS)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.protos
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
