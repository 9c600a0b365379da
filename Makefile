# make serve   set up .venv and serve the built-in demo model
# make test    set up .venv with the development extras and run the tests that protect every promise
# make test-all  those and the full products, sanitizers and ahead-of-time compiles
# make check   format, lint, types, layers, sizes
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
BUILT_FROM := pyproject.toml constraints.txt setup.py $(wildcard csrc/*/*.*)

.DELETE_ON_ERROR:
.PHONY: serve test test-all check format bench clean

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

$(VENV)/.serve: $(VENV)/bin/python $(BUILT_FROM)
	@echo "installing moeserve and its dependencies in $(VENV) and compiling its kernels; some minutes, once"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python $(BUILT_FROM)
	@echo "installing moeserve, its dependencies and the development tools in $(VENV); some minutes, once"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.serve

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
