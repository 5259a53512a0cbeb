# Everything here sets itself up: the first call creates .venv and installs the pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# A test process a core, each with one thread: models here are so small that threads only wait for each other.
WORKERS ?= auto
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile

.PHONY: demo test test-all test-slurm lint format clean

demo: $(READY)
	$(BIN)/assay train configs/demo.toml

test: $(READY)
	$(PYTEST) -m "not slow and not gpu and not peer and not slurm"

test-all: $(READY)
	$(PYTEST) -m "not slurm"

# Needs Debian's slurm-wlm and munge, or the like; the daemons are its own and end with it.
test-slurm: $(READY)
	$(BIN)/pytest -m slurm tests/slurm

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("assay needs Python 3.11 or later; call make with PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@# torch first and by its pin alone: a looser requirement could pull another build of it
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
