# Set-up happens by itself: every target below makes what it needs. Needs Python 3.11+, a C compiler and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
QUICK ?=
JOBS ?= 1

.PHONY: demo cloud older-duckdb test check lint types format live matrix serve bakeoff bench-gateway setup clean help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-13s %s\n", $$1, $$2}'

demo: $(VENV)/.installed  ## chat with a real model, then race real engines and print the ranking (some minutes on a new machine)
	@$(BIN)/python scripts/demo.py

# With JOBS=2 what measures no time runs in two processes, then the rest (tests/conftest.py lists it) by itself.
test: $(VENV)/.installed-dev  ## all tests; JOBS=2 runs two at a time where no time is measured, PYTEST_ARGS chooses some
ifneq ($(PYTEST_ARGS)$(filter 1,$(JOBS)),)
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS)
else
	@echo "part 1 of 2: $(JOBS) at a time, what measures no time"; \
	$(BIN)/python -m pytest -q -m 'not alone' -n $(JOBS) --dist loadscope; first=$$?; \
	echo "part 2 of 2: one after another, what measures time or computes with every core"; \
	$(BIN)/python -m pytest -q -m alone; second=$$?; \
	if [ $$first = 0 ] && [ $$second = 0 ]; then echo "tests: both parts passed"; \
	else echo "tests: FAILED (exit status of part 1: $$first, of part 2: $$second)"; exit 1; fi
endif

check: lint types test  ## lint + types + tests

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && echo "lint: clean"

types: $(VENV)/.installed-dev
	@$(BIN)/mypy

format: $(VENV)/.installed-dev  ## format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

live: $(VENV)/.installed-dev  ## probe every engine installed here, through its adapter and the gateway, and write docs/engine-matrix.md
	@$(BIN)/goodgate models pull
	@GOODGATE_LIVE=all GOODGATE_LIVE_REPORTS=runs/live $(BIN)/python -m pytest -q -s tests/live $(PYTEST_ARGS)
	@$(BIN)/python scripts/engine_matrix.py --live runs/live

matrix: $(VENV)/.installed-dev  ## write the tables of docs/engine-matrix.md, docs/api.md and docs/metrics.md from what the code declares
	@$(BIN)/python scripts/engine_matrix.py
	@$(BIN)/python scripts/metrics_page.py

serve: $(VENV)/.installed  ## serve the default model on 127.0.0.1:8080
	@$(BIN)/goodgate models pull
	@$(BIN)/goodgate serve

bakeoff: $(VENV)/.installed  ## the full race of every engine installed here; ENGINES=a,b chooses
	@$(BIN)/goodgate models pull
	@$(BIN)/goodgate arena run configs/scenarios/chat.yaml $(if $(ENGINES),--engines $(ENGINES))

bench-gateway: $(VENV)/.installed-dev  ## measure the gateway beside others and write docs/performance.md; BENCH chooses: BENCH='soak --minutes 30'
	@$(BIN)/goodgate bench-gateway $(or $(BENCH),all) --write docs/performance.md

cloud: $(VENV)/cloud/.installed  ## add litellm in an environment of its own, so that the cloud adapter's tests run

older-duckdb: $(VENV)/duckdb-1.5/.installed  ## add an older DuckDB in an environment of its own, so that a test reads an archive with it

setup: $(VENV)/.installed-dev  ## only the set-up, for developers

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Goodgate needs Python 3.11 or newer; name one with: make PYTHON=python3.11")'
	@echo "setting up $(VENV) (torch is about 200 MB as a CPU build, and some GB where the package index has it for CUDA)"
	@$(PYTHON) -m venv $(VENV) || { echo "Python's venv module is missing; on Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	@$(PIP) torch
	@$(PIP) --editable '.[native,arena]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "adding the tools that the tests need"
	@$(PIP) --editable '.[dev]'
	@touch $@

# litellm wants an older openai SDK and hub client than the tests do: see the extra `cloud` in pyproject.toml.
$(VENV)/cloud/.installed: constraints-cloud.txt
	@echo "adding litellm beside them in $(VENV)/cloud (about 400 MB)"
	@$(PYTHON) -m venv $(VENV)/cloud
	@$(VENV)/cloud/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cloud.txt litellm
	@touch $@

$(VENV)/duckdb-1.5/.installed:
	@$(PYTHON) -m venv $(VENV)/duckdb-1.5
	@$(VENV)/duckdb-1.5/bin/python -m pip install --quiet --disable-pip-version-check 'duckdb>=1.5,<1.6'
	@touch $@

clean:  ## remove the set-up (models and engines under .goodgate stay)
	rm -rf $(VENV) build *.egg-info
