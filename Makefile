VENV ?= .venv
PYTHON ?= python3
TEST_WORKERS ?= 3
# Libraries of macOS do not survive a fork.
PYTEST_WORKERS := $(if $(filter Darwin,$(shell uname -s)),-n $(TEST_WORKERS) --dist worksteal,-p tests.workers --workers $(TEST_WORKERS))
BIN := $(VENV)/bin
# INSTALLER=uv takes a fifth of the time, but does not read pip's configuration. With pip, half of
# the time would be compilation, mostly of modules that are never imported.
INSTALLER ?= pip
INSTALL.pip := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
INSTALL.uv := uv pip install --quiet --index-strategy unsafe-best-match --python $(BIN)/python
INSTALL := $(INSTALL.$(INSTALLER)) -c constraints.txt

# Commands and test workers read modules that an earlier process compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test check types snippets lint meters docs format bench models clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

install: $(VENV)/dev ## install the package and all development tools

demo: $(VENV)/local ## classify handwriting and photographs, write bottega-demo.html
	$(BIN)/bottega demo

test: $(VENV)/dev ## run the test suite in TEST_WORKERS processes
	$(BIN)/python -m pytest $(PYTEST_WORKERS)

check: $(VENV)/dev ## run types, snippets, lint and meters in parallel
	$(MAKE) --no-print-directory --keep-going --jobs 4 types snippets lint meters

types: ## check types
	$(BIN)/mypy

snippets: ## run every command and snippet of the documents
	$(BIN)/python -m docs.run_snippets

lint: ## check style, formatting and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

meters: ## compare measurements of the source with their limits
	$(BIN)/python -m meters

# Broken links and pages missing from the navigation are errors.
docs: $(VENV)/dev ## build the documentation site in site/
	$(BIN)/python -m docs.site

format: $(VENV)/dev ## fix style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# About ten minutes on a quiet machine.
bench: $(VENV)/dev ## run quick benchmarks, compare them with recorded ratios
	$(BIN)/python -m benchmarks.regression

# About three hours on two cores (see training/README.md).
models: $(VENV)/dev ## train apprentice, master and compressor again
	$(BIN)/python -m training --work models-work

clean: ## delete the environment, builds and caches
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make demo PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/local: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing into $(VENV): about a minute on a fast line"
	@test "$$(uname -s)$$PIP_EXTRA_INDEX_URL" != Linux || echo "without an index of CPU builds (README), torch takes about 6 GB"
	$(INSTALL) -e '.[local,photos]'
	touch $@

$(VENV)/dev: $(VENV)/local
	$(INSTALL) -e '.[local,eval,serve,ui,shared,milvus,batch,otel,docs,dev]'
	touch $@
