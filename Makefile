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
# An idle worker takes over tests of a busy one.
XDIST = -n $(WORKERS) --dist worksteal
PYTEST = $(RUN) -m pytest $(XDIST) $(PYTEST_ARGS)
RUFF := $(VENV)/bin/ruff
# Python compiles what it imports, and no more; it must then keep it, though.
PIP_INSTALL = -m pip install -qq --no-compile
unexport PYTHONDONTWRITEBYTECODE
SOURCES := $(wildcard treeadapt tests benchmarks docs .ci/*.py .ci/oracles) setup.py

# The lowest versions that setup.cfg allows have an environment of their own, and run
# the tests of what touches another library. (``test_traps`` is not among them: it holds
# down what the newest libraries do by themselves.)
LOWEST := .venv-lowest
LOWEST_READY := $(LOWEST)/.ready
LOWEST_TESTS := $(addprefix tests/test_,$(addsuffix .py, \
	adapt adapters alone callbacks carry carry_migration checkpoints cli convert drafts \
	example_migrations found_files freeze golden hyperparams integrations laws lift \
	load_migration memory_plan migration_tables migrations optax_partition partition \
	paths per_layer per_layer_meshes process_checkpoints rename rules scanned schemas \
	selectors sharded_trees sharding shards slices split stacks stacks_law state \
	updates upstream))

# The newest Python that is installed, with the newest JAX that it gets, runs the tests of
# what touches another library or Python itself; ``make test-newest NEWEST_TESTS=tests``
# runs all. Versions that pyenv keeps count, whether or not pyenv has put them on the path.
NEWEST := .venv-newest
NEWEST_READY := $(NEWEST)/.ready
PYENV_ROOT ?= $(HOME)/.pyenv
NEWEST_PYTHON ?= $(shell for python in python3.14 \
	$(wildcard $(PYENV_ROOT)/versions/3.14.*/bin/python3) python3.13 \
	$(wildcard $(PYENV_ROOT)/versions/3.13.*/bin/python3) python3.12 \
	$(wildcard $(PYENV_ROOT)/versions/3.12.*/bin/python3); do \
	$$python -c 'import venv' 2>/dev/null && echo $$python && break; done)

NEWEST_TESTS ?= $(addprefix tests/test_,$(addsuffix .py, \
	adapt adapters alone boxes caches callbacks carry checkpoints depth donation \
	drafts drawing found_files freeze golden hyperparams integrations jax_internals \
	laws lift memory_plan optax_partition partition per_layer per_layer_meshes \
	process_checkpoints registry scanned sharded_trees sharding shards stacks_law statics threads traps \
	unrolled_models untrusted updates upstream))

# Models of transformers, in PyTorch and in Flax. ``make TORCH="torch --index-url ..."``
# takes another build of PyTorch; without any, the half with Flax runs. PEFT comes after
# it, because it asks for PyTorch itself.
MODELS := .venv-models
MODELS_READY := $(MODELS)/.ready
TORCH ?= torch==2.13.0
PEFT := peft==0.21.2

# Training loops of other libraries. One that cannot be installed is left out: the tests
# say so, and skip it. (sbx brings PyTorch.)
LOOPS := .venv-loops
LOOPS_READY := $(LOOPS)/.ready

# One environment for each optional library.
ALONE := .venv-alone

.DEFAULT_GOAL := help
.PHONY: help demo demo-lm test test-slow test-full test-lowest test-newest test-models \
	test-oracles test-loops environments test-alone lint format bench \
	bench-gpu docs compatibility dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

demo: $(READY)  ## fine-tune a real Brax PPO agent, part of it frozen
	@$(RUN) docs/examples/brax_ppo.py

demo-lm: $(MODELS_READY)  ## fine-tune a GPT-2 from PyTorch with LoRA, and give it back
	@$(MODELS)/bin/python docs/examples/gpt2_lora.py

test: $(READY)  ## run six cases of each test (WORKERS=2, PYTEST_ARGS="-k name")
	@$(PYTEST) -m "not slow"

test-slow: $(READY)  ## run all other cases, and what takes long: pages, kills, demo
	@$(PYTEST) -m slow

test-full: $(READY)  ## run the tests at full size, with twenty times the random examples
	@XLA_FLAGS=--xla_backend_optimization_level=3 $(PYTEST) --hypothesis-profile=full

test-lowest: $(LOWEST_READY)  ## run tests with the lowest versions that setup.cfg allows
	@$(LOWEST)/bin/python -m pytest $(XDIST) --hypothesis-profile=quick \
		-p no:cacheprovider $(LOWEST_TESTS) $(PYTEST_ARGS)

ifeq ($(NEWEST_PYTHON),)
test-newest:
	@echo "test-newest: SKIPPED, no Python 3.12 or later was found."
else
test-newest: $(NEWEST_READY)  ## run tests on the newest Python, with its newest JAX
	@$(NEWEST)/bin/python -c 'import sys, jax; \
		print("Python", sys.version.split()[0], "with jax", jax.__version__)'
	@$(NEWEST)/bin/python -m pytest $(XDIST) --hypothesis-profile=quick \
		-p no:cacheprovider $(NEWEST_TESTS) $(PYTEST_ARGS)
endif

test-models: $(MODELS_READY)  ## convert models of transformers; compare what they answer
	@$(MODELS)/bin/python -c 'import torch; print("PyTorch", torch.__version__)' 2>/dev/null \
		|| echo "test-models: PyTorch is NOT INSTALLED; only the half with Flax runs."
	@$(MODELS)/bin/python -m pytest $(XDIST) --dist loadscope -p no:cacheprovider \
		tests/models $(PYTEST_ARGS)

test-oracles:  ## ask the libraries of published tables again (ORACLES="tunix gemma")
	@NEWEST_PYTHON="$(NEWEST_PYTHON)" $(PYTHON) .ci/oracles/run.py $(ORACLES)

test-loops: $(LOOPS_READY)  ## run the training loops of other libraries with partition
	@XLA_FLAGS=--xla_force_host_platform_device_count=1 $(LOOPS)/bin/python -m pytest \
		$(XDIST) --dist loadscope -p no:cacheprovider \
		-W default -W error::treeadapt.TreeAdaptWarning tests/loops $(PYTEST_ARGS)

environments: $(READY) $(LOWEST_READY) $(MODELS_READY) $(LOOPS_READY) $(if $(NEWEST_PYTHON),$(NEWEST_READY))  ## set up the environments of all tests but test-alone

test-alone: $(READY)  ## run tests with no optional library, and with each one alone
	@$(RUN) .ci/alone.py $(ALONE)

lint: $(READY)  ## check format, style and types
	@$(RUFF) format --config .ci/ruff.toml --check $(SOURCES)
	@$(RUFF) check --config .ci/ruff.toml --output-format concise $(SOURCES)
	@$(VENV)/bin/mypy
	@$(VENV)/bin/mypy --config-file= --strict --follow-imports=silent \
		tests/consumer_types.py

format: $(READY)  ## rewrite the sources in the common format
	@$(RUFF) check --config .ci/ruff.toml --fix --quiet $(SOURCES) || true
	@$(RUFF) format --config .ci/ruff.toml $(SOURCES)

bench: $(READY)  ## measure speed beside baselines
	@$(RUN) -m benchmarks

bench-gpu: $(READY)  ## measure speed on a GPU, in under eight minutes
	@$(RUN) -m benchmarks.gpu

docs: $(DOCS_READY)  ## build the documentation in docs/_build/html; a warning is an error
	@# All pages, because Sphinx 9 forgets the words of those that did not change.
	@$(RUN) -m sphinx -a -b html -W --keep-going -q docs docs/_build/html
	@$(RUN) docs/scripts/check_search.py docs/_build/html
	@echo "docs/_build/html/index.html"

compatibility: $(READY)  ## run every Optax transformation on every kind of tree
	@$(RUN) docs/scripts/compatibility.py

dist: $(READY)  ## build wheel and sdist in dist
	@$(RUN) -m build --no-isolation > /dev/null
	@ls dist

clean:  ## remove everything that make made
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(MODELS) $(LOOPS) $(ALONE) .venv-oracles build dist docs/_build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.cfg setup.py treeadapt/_version.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=..."; exit 1; }
	@echo "Setting up $(VENV), once; this takes a minute or two."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(RUN) $(PIP_INSTALL) --upgrade pip
	@$(RUN) $(PIP_INSTALL) --editable ".[test,bench]"
	@touch $@

$(LOWEST_READY): setup.cfg setup.py .ci/lowest.py treeadapt/_version.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=..."; exit 1; }
	@echo "Setting up $(LOWEST), once; this takes a minute or two."
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(PYTHON) .ci/lowest.py > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python $(PIP_INSTALL) --constraint $(LOWEST)/constraints.txt \
		--editable ".[test]"
	@touch $@

$(NEWEST_READY): setup.cfg setup.py treeadapt/_version.py
	@echo "Setting up $(NEWEST) with $(NEWEST_PYTHON), once; this takes a minute or two."
	@$(NEWEST_PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(NEWEST)/bin/python $(PIP_INSTALL) --editable ".[test]"
	@touch $@

$(MODELS_READY): setup.cfg setup.py .ci/models.txt treeadapt/_version.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=..."; exit 1; }
	@echo "Setting up $(MODELS), once; this takes a minute or two."
	@$(PYTHON) -m venv --clear $(MODELS)
	@$(MODELS)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(MODELS)/bin/python $(PIP_INSTALL) \
		--editable ".[checkpoints,equinox,flax]" --requirement .ci/models.txt
	@if $(MODELS)/bin/python $(PIP_INSTALL) $(TORCH); then \
		$(MODELS)/bin/python $(PIP_INSTALL) $(PEFT) \
			|| echo "$(MODELS): pip cannot install $(PEFT)."; \
	else echo "$(MODELS): pip found no $(TORCH)."; fi
	@touch $@

# One library of these at a time if they cannot be installed together.
$(LOOPS_READY): setup.cfg setup.py .ci/loops.txt treeadapt/_version.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=..."; exit 1; }
	@echo "Setting up $(LOOPS), once; this takes a few minutes."
	@$(PYTHON) -m venv --clear $(LOOPS)
	@$(LOOPS)/bin/python $(PIP_INSTALL) --upgrade pip
	@$(LOOPS)/bin/python $(PIP_INSTALL) $(TORCH) || echo "$(LOOPS): pip found no $(TORCH)."
	@$(LOOPS)/bin/python $(PIP_INSTALL) --editable ".[checkpoints,equinox,flax]" \
		pytest pytest-xdist hypothesis
	@$(LOOPS)/bin/python $(PIP_INSTALL) --requirement .ci/loops.txt \
		|| while read -r library; do \
			$(LOOPS)/bin/python $(PIP_INSTALL) "$$library" </dev/null \
			|| echo "$(LOOPS): pip cannot install $$library."; done < .ci/loops.txt
	@touch $@

# Only ``make docs`` needs these.
$(DOCS_READY): $(READY)
	@$(RUN) $(PIP_INSTALL) --editable ".[docs]"
	@touch $@
