# Each target makes the virtual environment and installs everything it needs, from nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: train test check format clean

train: $(INSTALLED)  ## Train a small GPT on real text under 1F1B and ZB-V and compare them.
	$(BIN)/python examples/train_and_compare.py --out runs/train

test: check  ## Everything that must hold before a change lands.
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + "; set PYTHON=") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) runs
