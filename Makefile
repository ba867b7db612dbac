# make test | make bench | make lint … each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
SOURCES := $(wildcard csrc/*) CMakeLists.txt setup.py

.PHONY: test lint types bench bench-suite sanitize aarch64 clean

test: $(BUILT)
	$(BIN)/python -m pytest -q

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BUILT)
	$(BIN)/mypy ngn_kernels

bench: $(BUILT)
	$(BIN)/ngn-bench step

bench-suite: $(BUILT)
	$(BIN)/python -m pytest -q bench --benchmark-only

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip setuptools
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet -c constraints.txt "torch" numpy
	NGN_REQUIRE_EXTENSION=1 $(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(BUILT)

$(BUILT): $(INSTALLED) $(SOURCES)
	NGN_REQUIRE_EXTENSION=1 $(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info ngn_kernels/*.so
