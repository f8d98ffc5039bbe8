VENV ?= .venv
PYTHON ?= python3
TEST_WORKERS ?= 3
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Commands and test workers read modules that an earlier process compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test check types snippets lint docs format bench models clean

# Everything that the targets below need. Each of them installs it if it is missing.
install: $(VENV)/dev

demo: $(VENV)/local
	$(BIN)/bottega demo

test: $(VENV)/dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

# Types, every command and snippet of the documents, lint and import contracts, in parallel.
check: $(VENV)/dev
	$(MAKE) --no-print-directory --keep-going --jobs 3 types snippets lint

types:
	$(BIN)/mypy

snippets:
	$(BIN)/python -m docs.run_snippets

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# Build the documentation site in site/. Broken links and pages missing from the navigation are errors.
docs: $(VENV)/dev
	$(BIN)/python -m docs.site

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Quick benchmarks, compared with recorded ratios: about ten minutes on a quiet machine.
bench: $(VENV)/dev
	$(BIN)/python -m benchmarks.regression

# Train both bundled models again: about two hours on two cores (see training/README.md).
models: $(VENV)/dev
	$(BIN)/python -m training --work models-work

clean:
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
