# The two that matter: `make demo` trains a model with two ranks, `make test` runs every test. Both set up .venv first.

PYTHON ?= python3
# More options for pip, for example PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu" (a torch without CUDA).
PIP_OPTIONS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -c constraints/cpu.txt
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: demo test check dev bench clean

demo: $(RUN_STAMP)
	$(BIN)/fullshard train examples/demo.toml

test: $(DEV_STAMP)
	$(BIN)/python -m pytest

check: $(DEV_STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

dev: $(DEV_STAMP)

# One workload with every engine, the cost of Python, and the optimizer. Peers get an environment of their own, which pip fills on first use.
bench: $(RUN_STAMP)
	PIP_OPTIONS="$(PIP_OPTIONS)" $(BIN)/python benchmarks/step_time.py --workload a --rounds 5 --steps 4
	$(BIN)/python benchmarks/host_time.py
	$(BIN)/python benchmarks/optimizer_step.py --workload a

clean:
	rm -rf $(VENV) benchmarks/.peers build runs .pytest_cache .hypothesis .mypy_cache .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The package and what it needs to run: quick, so that the demo starts soon.
$(RUN_STAMP): pyproject.toml constraints/cpu.txt | $(BIN)/python
	$(PIP_INSTALL) --editable .
	touch $@

# The tools of developers on top.
$(DEV_STAMP): $(RUN_STAMP)
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@
