# One command each: `make demo` shows what it does, `make test` proves it, `make check` is what a commit must pass.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.PHONY: demo test check install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo/pictures: | install
	$(BIN)/python examples/shapes/draw.py $@

demo: install demo/pictures
	$(BIN)/simpletuner train --config examples/shapes/demo.toml

test: install
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

clean:
	rm -rf demo .pytest_cache .ruff_cache .hypothesis
