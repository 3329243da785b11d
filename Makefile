# Every target sets up what it needs: python3 with venv, and make, are all that must be there.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
LINKS := build/types
OTHER = build/torch-$(TORCH)
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile  # what one file compiles is compiled once

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-torch bench lint types format clean

help: ## Say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 12

demo: $(STAMP) ## Train a model under a budget that it does not fit without rematc
	$(BIN)/python -m benchmarks.demo

test: lint ## Lint, types, and all tests but the slow ones
	$(PYTEST) -m "not slow"

test-all: lint ## The same with the slow tests
	$(PYTEST)

test-torch: ## The tests with another torch, which may be gigabytes: make test-torch TORCH=2.11.0
	$(PYTHON) -m venv $(OTHER)
	grep -vE '^(torch|setuptools|sympy)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install -c $(OTHER)/constraints.txt torch==$(TORCH) -e '.[dev]'
	$(OTHER)/bin/python -m pytest -n 2 --dist loadfile -m "not slow"

bench: $(STAMP) ## Run again what the README claims
	$(BIN)/python -m benchmarks

lint: $(STAMP) ## ruff and mypy; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory types

# mypy knows modules by their place on disk, and there passes/ is not in rematc/: so it reads links.
types: $(STAMP) ## mypy alone
	@rm -rf $(LINKS)/rematc && mkdir -p $(LINKS)/rematc
	@ln -s $(CURDIR)/rematc/* $(CURDIR)/passes $(LINKS)/rematc/
	cd $(LINKS) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml

format: $(STAMP) ## Lay the code out, and mend what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the virtual environment and all that was made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@
