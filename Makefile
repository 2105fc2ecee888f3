# Every target does its own set-up: Python 3.11 or later, make and a package index
# are all that a fresh machine needs.

VENV ?= .venv
WORKERS ?= 2
PYTEST_ARGS ?=
# The first Python that is new enough; choose another with ``make PYTHON=...``.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
RUN := $(VENV)/bin/python
PYTEST = $(RUN) -m pytest -n $(WORKERS) $(PYTEST_ARGS)
RUFF := $(VENV)/bin/ruff
SOURCES := $(wildcard treeadapt tests benchmarks docs) setup.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint format bench docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

demo: $(READY)  ## fine-tune a real Brax PPO agent, part of it frozen
	@$(RUN) docs/examples/brax_ppo.py

test: $(READY)  ## run the tests (WORKERS=2, PYTEST_ARGS="-k name")
	@$(PYTEST)

test-full: $(READY)  ## run the tests with ten times the random examples
	@$(PYTEST) --hypothesis-profile=full

lint: $(READY)  ## check format, style and types
	@$(RUFF) format --config .ci/ruff.toml --check $(SOURCES)
	@$(RUFF) check --config .ci/ruff.toml --output-format concise $(SOURCES)
	@$(VENV)/bin/mypy

format: $(READY)  ## rewrite the sources in the common format
	@$(RUFF) check --config .ci/ruff.toml --fix --quiet $(SOURCES) || true
	@$(RUFF) format --config .ci/ruff.toml $(SOURCES)

bench: $(READY)  ## measure speed beside baselines
	@$(RUN) -m benchmarks

docs: $(DOCS_READY)  ## build the documentation in docs/_build/html; a warning is an error
	@$(RUN) docs/scripts/compatibility.py
	@$(RUN) -m sphinx -b html -W --keep-going -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.cfg setup.py treeadapt/_version.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=..."; exit 1; }
	@echo "Setting up $(VENV), once; this takes a minute or two."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN) -m pip install -qq --upgrade pip
	@$(RUN) -m pip install -qq --editable ".[test,bench]"
	@touch $@

# Only ``make docs`` needs these.
$(DOCS_READY): $(READY)
	@$(RUN) -m pip install -qq --editable ".[docs]"
	@touch $@
