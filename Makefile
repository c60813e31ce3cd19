PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup
PROJECTS := core $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/*/pyproject.toml))

.PHONY: setup demo test test-all lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(PROJECTS:%=%/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python -c constraints.txt --group dev $(PROJECTS:%=-e %)
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -m "not slow"

test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .demo
