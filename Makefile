# Every target makes the virtual environment first, and that is a matter of milliseconds once it is there.
#   make demo          train the same model in plain PyTorch and with ops-math, and open the report
#   make test          lint, types and all tests that need no GPU
#   make full          make test and what it only samples: more cases, dtypes, planted causes
#   make fast          the tests that run before each commit, two minutes on two cores
#   make gpu           the tests that need a GPU
#   make lint types docs clean
# PYTHON=python3.12 picks the interpreter (a torch that it already has is used), TORCH_SPEC=torch==2.12.0 another torch.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
REUSE_TORCH := $(if $(filter undefined,$(origin PYTHON)),,--reuse-torch)
TORCH_IS_A_WISH := $(if $(filter undefined,$(origin TORCH_SPEC)),,--torch-is-a-wish)
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(or $(shell for p in python3 python3.13 python3.12 python3.11; do "$$p" -c "$(SUPPORTED)" 2>/dev/null && echo "$$p" && break; done),python3)
TORCH_SPEC ?= torch==2.13.0

# One thread for each test process: two processes share the machine, and a small tensor gains nothing from more.
TESTS := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

.PHONY: help env demo test full fast gpu lint types docs clean

help:
	@sed -n 's/^#   //p' Makefile

env:
	@"$(PYTHON)" scripts/bootstrap.py --venv $(VENV) --torch "$(TORCH_SPEC)" $(REUSE_TORCH) $(TORCH_IS_A_WISH)

demo: env
	@$(VENV)/bin/ops-math train --model llama-tiny --steps 60 --compare --report build/demo
	@echo "The report: $(CURDIR)/build/demo/report.html"

test: lint types
	$(TESTS) -m "not gpu and not long" -n 2 --dist worksteal

full: lint types
	$(TESTS) -m "not gpu" -n 2 --dist worksteal

fast: env
	$(TESTS) -m "not gpu and not slow and not interpreter" -n 2 --dist worksteal -q

gpu: env
	$(VENV)/bin/python -m pytest -m gpu

lint: env
	$(VENV)/bin/python -m ruff check .

types: env
	$(VENV)/bin/python -m mypy

docs: env
	$(VENV)/bin/python -m mkdocs build --strict --site-dir build/site

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
