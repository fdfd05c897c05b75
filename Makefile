# Everything sets itself up from a bare python3 (>= 3.11): .venv is made on first use.
PYTHON ?= python3
VENV := .venv
NEWEST := .venv-newest
REAL := .venv-real
BIN := $(VENV)/bin
# A Python >= 3.12, for the newest JAX: the first of these that there is.
NEWEST_PYTHON := $(shell for v in 3.13 3.12; do \
	for p in "$$(pyenv root 2>/dev/null)"/versions/$$v*/bin/python python$$v; do \
	if "$$p" -c '' 2>/dev/null; then echo "$$p"; exit; fi; done; done)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JAX_PLATFORMS ?= cpu

.PHONY: help demo test test-all test-newest test-remat3 bench corpus-env check docs pictures format newest-python clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.base  ## train a small transformer on this CPU three ways and compare
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev  ## the test suite
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/.dev  ## with the slow sweeps
	$(BIN)/python -m pytest -n 2 -m "slow or not slow" --hypothesis-profile=random

# What may change with JAX's version: its internals, regions, loops, adapters, how programs are rewritten and
# what the compiler reports. Searches, pages and the command line are tested once, and so are other seeds.
CORE = tests/_jax tests/ir tests/transform tests/sweeps tests/program/test_compiled.py \
	$(CORE_LOOPS:%=tests/loops/test_%.py) $(CORE_ADAPTERS:%=tests/adapters/test_%.py) \
	$(CORE_PLANNER:%=tests/planner/test_%) tests/explain/test_account.py tests/explain/test_hlo.py \
	tests/test_internals.py tests/test_public_api.py tests/test_testing.py
CORE_LOOPS = buffers custom_jvp custom_vjp derivative inverse linear refs remat_scan scan sharded_loops \
	symbolic_lengths while_loop
CORE_ADAPTERS = linen_checkpoint nnx equinox haiku brainstate
CORE_PLANNER = offload.py plan.py rewrite.py scan_pairs.py \
	fit.py::test_fitted_step_returns_what_the_step_returns \
	distributed_plan.py::test_all_processes_wait_for_the_plan_of_the_first

test-newest: $(NEWEST)/.dev  ## the core tests on the newest JAX (needs a Python >= 3.12)
	$(NEWEST)/bin/python -m pytest -n 2 -p no:cacheprovider $(CORE)

test-remat3: $(NEWEST)/.dev  ## the tests of regions and loops with JAX's coming remat switched on
	JAX_REMAT3=1 $(NEWEST)/bin/python -m pytest -n 2 -p no:cacheprovider tests/transform tests/loops

bench: $(VENV)/.dev  ## speed and memory, as ratios against the alternatives in the same run
	$(BIN)/python -m benchmarks

corpus-env: $(REAL)/.done  ## the packages of `python -m benchmarks real`, pinned, into .venv-real

check: $(VENV)/.dev  ## linter, formatter, type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev  ## the documentation site, into site/
	rm -rf site
	$(BIN)/python -m sphinx -q -W --keep-going -j auto -b html -d build/doctrees docs site
	@echo "site/index.html"

pictures: $(VENV)/.dev  ## draw the documentation's pictures anew
	$(BIN)/python docs/make_pictures.py

format: $(VENV)/.dev  ## apply the formatter
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

newest-python:  ## print the Python that test-newest would use
	@echo $(NEWEST_PYTHON)

clean:  ## remove what the targets made
	rm -rf $(VENV) $(NEWEST) $(REAL) .pytest_cache .mypy_cache .ruff_cache .hypothesis build site
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install -q -e ".[report]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

$(NEWEST)/.dev: pyproject.toml
	@test -n "$(NEWEST_PYTHON)" || { echo "No Python >= 3.12 found: set NEWEST_PYTHON."; exit 1; }
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q -e ".[dev]"
	touch $@

$(REAL)/.done: benchmarks/real/requirements.txt pyproject.toml
	@test -n "$(NEWEST_PYTHON)" || { echo "No Python >= 3.12 found: set NEWEST_PYTHON."; exit 1; }
	$(NEWEST_PYTHON) -m venv $(REAL)
	$(REAL)/bin/python -m pip install -q -r benchmarks/real/requirements.txt
	$(REAL)/bin/python -m pip install -q --no-deps -e .
	touch $@
