# Everything is installed into .venv and nowhere else. Another Python: make PYTHON=python3.12 test
PYTHON ?= python3
VENV ?= .venv
PYTEST_FLAGS ?= -n auto --maxprocesses 4

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# An install is done again when one of these changes, never for an edit in the sources.
SETUP := pyproject.toml setup.py

.DEFAULT_GOAL := help
.PHONY: help demo test gpu lint wheel clean

help:
	@echo "make demo    install into $(VENV) and run the detectors, patched and unpatched"
	@echo "make test    the same, then the whole test suite"
	@echo "make gpu     on a machine with a GPU: its tests, doctor --verify, benchmarks into $(RESULTS)"
	@echo "make lint    ruff"
	@echo "make wheel   dist/*.whl and dist/*.tar.gz"
	@echo "make clean   remove $(VENV) and all that was built"

demo: $(VENV)/.installed-all
	$(BIN)/deformops-models demo

# One thread per process, since the tests already run on several.
test: demo $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

# In another environment that has the dependencies: make gpu RUN=python3 PYTEST_FLAGS="-n 8"
RUN ?= $(BIN)/python
RESULTS ?= benchmarks/results
gpu: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
gpu:
	$(RUN) -m pytest -m gpu $(PYTEST_FLAGS)
	$(RUN) -m deformops_models.cli doctor --verify
	$(RUN) -m deformops_models.cli bench --model all --out $(RESULTS)
	$(RUN) -m deformops_models.cli bench --convergence --out $(RESULTS)
	$(RUN) -m deformops_models.cli bench --out $(RESULTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

wheel: $(VENV)/.installed-dev
	rm -rf build dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) deformops-demo deformops-bench build dist *.egg-info .pytest_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "deformops-models needs Python 3.10 or newer, and $(PYTHON) is not: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

# opencv-python, which mmcv-lite asks for, needs libGL; where a machine has none, the headless build takes its place.
$(VENV)/.installed-all: $(SETUP) | $(VENV)/bin/python
	$(PIP) install -e ".[all]"
	@$(BIN)/python -c "import cv2" 2>/dev/null || $(PIP) install --force-reinstall --no-deps opencv-python-headless
	@touch $@

$(VENV)/.installed-test: $(SETUP) $(VENV)/.installed-all
	$(PIP) install -e ".[all,test]"
	@touch $@

$(VENV)/.installed-dev: $(SETUP) | $(VENV)/bin/python
	$(PIP) install -e ".[dev]"
	@touch $@
