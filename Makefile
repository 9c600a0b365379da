# make serve   set up .venv and serve the built-in demo model
# make test    set up .venv with the development extras and run the tests that protect every promise
# make test-all  those and the full products, sanitizers and ahead-of-time compiles
# make check   format, lint, types, layers, sizes
# make wheel   build a wheel and an sdist in dist/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With a terminal pip shows its progress; without one it prints errors only, which keeps CI logs short.
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt $$([ -t 2 ] || echo -q)
ARGS ?=
# The demo guesses ahead by its own head.
SERVE = $(or $(ARGS),--speculate mtp:3)
WORKERS ?= 2
FULL ?=
BUILT_FROM := pyproject.toml constraints.txt

.DELETE_ON_ERROR:
.PHONY: serve test test-all check format wheel clean

# At a terminal the server gets a process group of its own, so that Ctrl-C reaches it and not make: it drains, exits 0.
serve: $(VENV)/.serve
	@if [ -t 0 ] && command -v bash > /dev/null; \
	  then exec bash -mc '$(BIN)/moeserve serve $(SERVE); exit $$?'; \
	  else exec $(BIN)/moeserve serve $(SERVE); fi

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --full "$(FULL)" $(ARGS)

test-all: $(VENV)/.dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --full all
	@$(BIN)/python tools/full_tests.py record

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "moeserve needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 1; }
	@echo "creating the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The kernels are compiled here, once, with progress; the installations below take the module as it is.
$(VENV)/.native: $(VENV)/bin/python setup.py $(wildcard csrc/*/*.?pp)
	@echo "compiling the native kernels in parallel; some minutes, once"
	@$(PIP) 'setuptools>=77' 'pybind11>=2.13'
	@$(BIN)/python setup.py -q build_ext --inplace
	@touch $@

$(VENV)/.serve: $(VENV)/.native $(BUILT_FROM)
	@echo "installing moeserve and its dependencies in $(VENV)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.native $(BUILT_FROM)
	@echo "installing moeserve, its dependencies and the development tools in $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.serve

wheel: $(VENV)/.native
	@$(PIP) build
	@$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
