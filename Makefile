PYTHON ?= python3
BIN := .venv/bin
# Two workers: most tests use one core, those of worker processes use more.
PYTEST_FLAGS ?= -n 2 --dist worksteal
STAMP := .venv/.setup
PROJECTS := core $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/*/pyproject.toml))

.PHONY: setup demo test test-all fuzz bench lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(PROJECTS:%=%/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python -c constraints.txt --group dev $(PROJECTS:%=-e %)
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -m "not slow"

test-all: setup
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

# A million damaged inputs for everything that is read from a network.
fuzz: setup
	$(BIN)/python -m mlxcel.testing.fuzz

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The figures of docs/performance.md; let nothing else run beside it.
BENCH_LOAD := --against mlx-lm --requests 8 --prompt-length 16 --output-length 12 -- --pp-size 2 --pp-balance time
MAKE_RANDOM := from pathlib import Path; from mlxcel.testing import random_llama as make; \
	make(Path('.demo/random-300m'), megabytes=1200, layers=24, dtype='float32')
bench: setup
	$(BIN)/mlxcel fetch-demo-model .demo/smollm2
	$(BIN)/mlxcel bench pipeline -m .demo/smollm2
	$(BIN)/mlxcel bench serve -m .demo/smollm2 $(BENCH_LOAD) --blas wheel --weights quantized
	$(BIN)/mlxcel bench serve -m .demo/smollm2 $(BENCH_LOAD)
	$(BIN)/mlxcel bench engine -m .demo/smollm2
	$(BIN)/mlxcel bench transport --sizes 1KiB,8KiB,64KiB,1MiB,4MiB,16MiB --repeats 9
	$(BIN)/mlxcel bench collectives
	$(BIN)/python -c "$(MAKE_RANDOM)"
	$(BIN)/mlxcel bench tensor -m .demo/random-300m

clean:
	rm -rf .venv .demo
