# `make demo` and `make test` do all set-up themselves; repeating them is safe.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo test test-slow lint format golden clean

help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

setup: $(READY)  ## create the virtual environment and install everything

demo: $(READY)   ## train a small model in front of you, then talk to it (about 10 minutes)
	$(BIN)/openzaya demo $(DEMO)

test: $(READY)   ## run the test suite
	$(BIN)/python -m pytest -q

test-slow: $(READY) ## run the checks that take minutes
	$(BIN)/python -m pytest -q -m slow

lint: $(READY)   ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## rewrite files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(READY) ## rewrite the resolved recipes and the golden trace that tests compare with
	$(BIN)/python -m tests.config.golden
	$(BIN)/python -m tests.checkpoint.golden_trace
	$(BIN)/python -m tests.checkpoint.test_tensors

clean:           ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache *.egg-info
