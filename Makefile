# Everything runs in .venv, made by the first target that needs it. Python 3.11 and make are all that must be there.
PYTHON ?= python3.11
VENV   ?= .venv
TRITON ?= 3.7.1
JOBS   ?= 2
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready-triton-$(TRITON)
CHECKS := $(VENV)/.ready-checks
# One BLAS thread per worker: two workers on two cores, and sums in one order.
export OPENBLAS_NUM_THREADS := 1
export OMP_NUM_THREADS := 1

.PHONY: help demo test check format bench reproduce nightly clean
help:  ## say what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "hybridkv needs Python 3.11 or newer, got " + sys.version' 
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed 's/^triton==.*/triton==$(TRITON)/' constraints.txt > $(VENV)/constraints.txt
	@$(BIN)/python -m pip --quiet --quiet install --disable-pip-version-check --progress-bar off \
		--constraint $(VENV)/constraints.txt --editable '.[testing,bench,cli,plot]'
	@rm -f $(VENV)/.ready-triton-* && touch $@

$(CHECKS): $(READY)
	@$(BIN)/python -m pip --quiet --quiet install --disable-pip-version-check --progress-bar off \
		--constraint $(VENV)/constraints.txt ruff 'pyright[nodejs]'
	@touch $@

demo: $(READY)  ## replay the built-in workload over all six memory organizations
	@$(BIN)/python -m hybridkv demo

test: $(READY)  ## the whole test suite, less what is marked nightly
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not nightly' $(ARGS)

check: $(CHECKS)  ## format, lint, types, import arrows
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/python -m pytest -q tests/test_tidy.py

format: $(CHECKS)  ## let ruff rewrite the files
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench: $(READY)  ## benches; medians as a table, rows as benches/results.jsonl
	@$(BIN)/python -m benches $(ARGS)

reproduce: $(READY)  ## the shape checks of depth batching, about 5 minutes; writes docs/reproduction.md
	@$(BIN)/python -m benches.reproduce $(ARGS)

nightly: $(READY)  ## the long searches, with their numbers printed
	@HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m nightly -s $(ARGS)

clean:  ## remove what make made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist
