# Everything runs in .venv, which is made on first use; what is installed there is installed again when
# pyproject.toml changes. The demo needs the least, everything else the tools of development on top.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/ready-demo
READY := $(VENV)/ready
# Without compiling what may never be imported: that takes longer than all imports of the demo.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile --editable

# Tests start many short processes: without compiled modules each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench docs audit clean

help: ## List these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(DEMO_READY): pyproject.toml | $(BIN)/pip
	$(INSTALL) '.[data]'
	@touch $@

$(READY): pyproject.toml | $(BIN)/pip
	$(INSTALL) '.[dev]'
	@touch $@ $(DEMO_READY)

demo: $(DEMO_READY) ## Train LeNet-5 on real digits, compress it to 2 bits, check it in ONNX Runtime, print the report
	$(BIN)/pipeline demo --overwrite -o demo

test: $(READY) ## Run all tests, on a worker per core
	$(BIN)/pytest

lint: $(READY) ## Check style, docstrings, types and the order of imports between folders
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(READY) ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## Measure every width, and compare with peers on real digits; benchmarks/ holds more
	$(BIN)/python benchmarks/widths.py
	$(BIN)/python benchmarks/widths.py --arch resnet8 --negative-gamma
	$(BIN)/python benchmarks/peers.py

docs: $(READY) ## Write the tables of docs/inputs.md and docs/architecture.md, and the API reference to build/docs
	$(BIN)/python tests/inputs_table.py
	$(BIN)/python tests/architecture_table.py
	$(BIN)/python tests/onnx_operators_table.py
	$(BIN)/pdoc --docformat google --math --output-directory build/docs ul2q.pipeline ul2q.exporters ul2q.runtimes ul2q.models

# Strict, for otherwise what the server does not know passes unseen. It knows no local versions, such as 2.9+cpu.
audit: $(READY) ## Look for known vulnerabilities in what is installed (asks PyPI)
	$(BIN)/pip install --quiet pip-audit
	@mkdir -p build
	$(BIN)/pip freeze --exclude-editable | sed 's/+.*//' > build/installed.txt
	@$(BIN)/pip-audit --strict --no-deps --disable-pip -r build/installed.txt || { \
		echo 'Vulnerable, or not audited: see above. Without a connection to PyPI itself (a mirror will not do) there is no audit.'; \
		exit 1; }

clean: ## Remove the virtual environment and everything built
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
