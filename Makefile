# Every command of the project. `make` alone prints this help.
# `make run` and `make test` work on a fresh machine and need nothing before them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CHECKOV := $(VENV)/checkov/bin/checkov
PHOENIX := $(VENV)/phoenix/bin/phoenix
MODEL  ?= models/demo
ARGS   ?=
PROTOS := $(wildcard protos/orcinus/v1/*.proto)
SOURCES := services kernels benchmarks examples models tests

# Tests that stand side by side stay in one worker, so that most systems that they share start once. Each worker takes
# ten seconds to begin.
TEST_WORKERS ?= 2
IN_PARALLEL  := -n $(TEST_WORKERS) --dist worksteal

# Faults that are injected one after the other, eight seconds each, and the seed that they are drawn by.
FAULTS_N    ?= 200
FAULTS_SEED ?=

# Images: where they are called what, for which device, and who builds them. IMAGE_BUILD is called with
# NAME CONTEXT OPTIONS, LOAD_IMAGE with the names of all; TORCH_INDEX is a pip index for torch, empty for the one of everything else.
IMAGES       := frontend scheduler worker demo-model
IMAGE_PREFIX ?= localhost/orcinus
TAG          ?= dev
DEVICE       ?= cpu
ENGINE       ?= $(shell docker info >/dev/null 2>&1 && echo docker || echo podman)
IMAGE_BUILD  ?= $(ENGINE) build $(if $(filter podman,$(notdir $(ENGINE))),--format docker) --tag
LOAD_IMAGE   ?= kind load docker-image
# What the tests of a cluster do to a node, whose name follows, and to the API server: a node of kind is a container.
CUT_NODE     ?= docker pause
HEAL_NODE    ?= docker unpause
STOP_API     ?= docker exec kind-control-plane pkill -STOP kube-apiserver
START_API    ?= docker exec kind-control-plane pkill -CONT kube-apiserver
TORCH_INDEX  ?= $(if $(filter cpu,$(DEVICE)),https://download.pytorch.org/whl/cpu)

# A machine with a GPU often has PyTorch already, and no way to install anything. So what needs a GPU runs without .venv too:
# the benchmark needs torch, triton, numpy and safetensors, and the tests of kernels pytest, pytest-timeout and hypothesis
# beside these. Those of ranks need .venv. Without it pytest lacks some of the plugins that its settings speak of.
GPU_PYTHON   ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
WITHOUT_VENV := -o addopts= --import-mode=importlib -W ignore::pytest.PytestConfigWarning tests/kernels

# The cluster is the one of kubectl's current context.
OVERLAY       ?= demo
NAMESPACE     ?= orcinus
READY_TIMEOUT ?= 35m
IN_NAMESPACE  := kubectl --namespace $(NAMESPACE)
# Workers are ready when their stages have loaded, the leading scheduler when it has a pipeline, frontends when they have a
# scheduler that leads. With the component lws there is no Deployment of workers.
wait_workers = if [ -n "$$($(IN_NAMESPACE) get deployment/orcinus-worker --ignore-not-found -o name)" ]; \
  then $(IN_NAMESPACE) rollout status deployment/orcinus-worker --timeout=$(READY_TIMEOUT); fi
wait_serving = $(wait_workers) && \
  $(IN_NAMESPACE) rollout status deployment/orcinus-scheduler --timeout=$(READY_TIMEOUT) && \
  $(IN_NAMESPACE) rollout status deployment/orcinus-frontend --timeout=$(READY_TIMEOUT)

.DEFAULT_GOAL := help
.PHONY: help setup constraints protos run test test-thorough test-system test-triton test-gpu test-faults test-hostile test-cluster test-prometheus test-phoenix check fmt fmt-check lint types layers bench bench-gpu demo-model images $(IMAGES:%=image-%) manifests deploy rollout-workers status undeploy clean

help:  ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-15s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Using it

setup: $(VENV)/.installed $(VENV)/.native  ## Make the virtual environment in .venv, with everything in it

run: setup  ## Serve MODEL (models/demo) on this machine; ARGS="--stages 2 …" goes to services.local
	@exec $(BIN)/python -m services.local --model $(MODEL) $(ARGS)

##@ Changing it

test: setup  ## Run the tests, TEST_WORKERS (2) at a time; ARGS goes to pytest
	$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

test-thorough: setup  ## Run more cases of what `make test` holds, which take minutes
	$(BIN)/python -m pytest -m 'thorough and not triton and not gpu' $(IN_PARALLEL) $(ARGS)

test-system: setup  ## Run only the tests of whole processes
	$(BIN)/python -m pytest -m system $(ARGS)

test-triton: setup  ## Run the tests that interpret or compile the kernels for GPUs, without one
	$(BIN)/python -m pytest -m 'triton and not gpu' $(ARGS)

test-gpu:  ## Run the tests that need a CUDA device, with GPU_PYTHON (.venv's, else PYTHON)
	$(GPU_PYTHON) -m pytest -m 'gpu and not thorough' $(if $(wildcard $(BIN)/python),,$(WITHOUT_VENV)) $(ARGS)

test-faults: setup  ## Kill and stop processes under load, FAULTS_N (200) times at random; FAULTS_SEED repeats a run
	FAULTS_N=$(FAULTS_N) FAULTS_SEED=$(FAULTS_SEED) $(BIN)/python -m pytest -m faults tests/faults -q -s $(ARGS)

test-hostile: setup  ## Attack the processes as strangers could, within the memory of their pods
	$(BIN)/python -m pytest -m hostile tests/hostile $(ARGS)

test-prometheus: setup  ## Run the tests that need Prometheus (Debian: apt-get install prometheus)
	@command -v promtool prometheus >/dev/null || { echo 'prometheus and promtool are missing: apt-get install prometheus'; exit 1; }
	$(BIN)/python -m pytest -m prometheus $(ARGS)

test-phoenix: setup $(PHOENIX)  ## Run the test that stores traces in Arize Phoenix
	PATH="$$PATH:$(CURDIR)/$(dir $(PHOENIX))" $(BIN)/python -m pytest -m phoenix tests/tracing_backend $(ARGS)

check: fmt-check lint types layers manifests test test-thorough test-triton  ## What CI runs: format, lint, types, layers, manifests, tests
	$(MAKE) test-faults FAULTS_N=8
	$(MAKE) test-hostile

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

manifests: setup $(CHECKOV)  ## Check the manifests by checkov's rules; `make test` holds them to schemas and our own
	$(BIN)/python -m tests.k8s.manifests $(VENV)/manifests
	$(CHECKOV) --directory $(VENV)/manifests --framework kubernetes --skip-download --compact --quiet

bench: setup  ## Measure the control plane and the scheduler against their budgets
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.control_plane

bench-gpu:  ## Measure kernels, iterations and a workload on a GPU, with GPU_PYTHON, in 8 minutes; ARGS="--out DIR"
	$(GPU_PYTHON) -m benchmarks.gpu --out build/gpu $(ARGS)

demo-model: setup  ## Train models/demo anew; ARGS="--minutes N"
	$(BIN)/python -m models.train_demo --out models/demo $(ARGS)

##@ On Kubernetes

images: $(IMAGES:%=image-%)  ## Build the images as IMAGE_PREFIX/…:TAG, for DEVICE (cpu or cuda)

# Dated as the commit and not as the build, so that building again changes nothing.
$(IMAGES:%=image-%): image-%:
	$(IMAGE_BUILD) $(IMAGE_PREFIX)/$*:$(TAG) . --target $* $(IMAGE_ARGS) \
	  --build-arg REVISION=$$(git describe --always --abbrev=40 --exclude '*' --dirty) \
	  --build-arg CREATED=$$(git log -1 --format=%cI)

image-worker: IMAGE_ARGS = --build-arg DEVICE=$(DEVICE) --build-arg TORCH_INDEX=$(TORCH_INDEX)

deploy:  ## Apply k8s/overlays/OVERLAY (demo) to the cluster of kubectl's context, and wait until it serves
	kubectl apply -k k8s/overlays/$(OVERLAY)
	@$(wait_serving)

# A pipeline takes only stages of one build, so there is no way from one to the next but through none: all at once.
rollout-workers:  ## Replace all workers at once; streams pause while the new ones load
	$(IN_NAMESPACE) rollout restart deployment/orcinus-worker
	@$(wait_serving)

status:  ## Print pods, who leads, and which of them give requests tokens now
	@$(IN_NAMESPACE) get pods --selector app.kubernetes.io/name=orcinus
	@printf '\nLEADER   %s\n' "$$($(IN_NAMESPACE) get lease orcinus-scheduler -o jsonpath='{.spec.holderIdentity}')"
	@for pod in $$($(IN_NAMESPACE) get pods -o name \
	    --selector 'app.kubernetes.io/name=orcinus,app.kubernetes.io/component in (frontend, scheduler)'); do \
	  why=$$( { timeout 10 $(IN_NAMESPACE) exec $$pod -- python -m services.common.healthcheck 127.0.0.1:50060 serving \
	    || echo 'no answer'; } 2>&1 | head -n 1); \
	  if [ -z "$$why" ]; then echo "SERVING  $$pod"; else echo "-        $$pod: $$why"; fi; \
	done

undeploy:  ## Delete everything that OVERLAY has made, its namespace included
	kubectl delete -k k8s/overlays/$(OVERLAY) --ignore-not-found --timeout=5m

test-cluster: setup images  ## Run the tests of a deployment on the cluster of KUBECONFIG; LOAD_IMAGE takes images there
	@test -n "$$KUBECONFIG" || { echo 'KUBECONFIG must name a cluster; "kind create cluster --kubeconfig FILE" makes one'; exit 1; }
	$(LOAD_IMAGE) $(IMAGES:%=$(IMAGE_PREFIX)/%:$(TAG))
	CUT_NODE='$(CUT_NODE)' HEAL_NODE='$(HEAL_NODE)' STOP_API='$(STOP_API)' START_API='$(START_API)' $(BIN)/python -m pytest -m cluster tests/cluster $(ARGS)

##@ Generated

protos: $(VENV)/.protos  ## Generate the code of the wire contracts into protos/gen

constraints: setup  ## Write what is installed into constraints.txt
	@{ sed -n 1p constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/^torch==\([0-9.]*\)+.*/torch==\1/' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## Remove everything that can be made again
	rm -rf $(VENV) protos/gen kernels/native/lib *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Orcinus needs Python 3.11 or newer; set PYTHON=…") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.protos: $(PROTOS) constraints.txt | $(BIN)/python
	@$(BIN)/python -c 'import grpc_tools' 2>/dev/null || $(BIN)/pip install --quiet -c constraints.txt grpcio-tools
	rm -rf protos/gen && mkdir -p protos/gen
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos/gen --pyi_out=protos/gen --grpc_python_out=protos/gen $(PROTOS)
	@touch $@

# Where there is no compiler, PyTorch's operations are used.
$(VENV)/.native: kernels/build.py $(wildcard kernels/native/src/*) | $(BIN)/python
	@if CXX='$(CXX)' $(BIN)/python kernels/build.py; then touch $@; \
	else echo 'PyTorch'"'"'s operations are used instead. Native ones need g++ 12 or newer (Debian: apt-get install g++)'; fi

# checkov wants versions that nothing else here can live with.
$(CHECKOV): | $(BIN)/python
	$(PYTHON) -m venv $(@D:/bin=)
	$(@D)/pip install --quiet checkov==3.3.30

# Licensed under Elastic 2.0: a tool of tests, that nothing of ours imports, contains or is delivered with.
$(PHOENIX): | $(BIN)/python
	$(PYTHON) -m venv $(@D:/bin=)
	$(@D)/pip install --quiet arize-phoenix==20.26.1

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.protos
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
