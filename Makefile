PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
REGRESSION_STAMP := $(VENV)/.regression-installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint unit interpreter aot gpu-check mutations bench experiments regression figures train traces clean

# List the targets.
help:
	@awk '/^# /{text=substr($$0,3)} /^[a-z-]+:/{split($$0,a,":"); printf "%-12s %s\n", a[1], text}' Makefile

# Create .venv and install requirements.txt, if that has not been done.
setup: $(STAMP)

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v in ((3, 11), (3, 12)) else f"Python 3.11 or 3.12 is needed, $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12")'
	@test ! -L $(VENV) || { echo "setup: $(VENV) is a link to $$(readlink $(VENV)), which would be emptied: remove the link, or run make setup there"; exit 1; }
	@echo "setup: creating $(VENV) with $$($(PYTHON) --version) and installing requirements.txt (some minutes)"
	@echo "setup: the download is large: several GB with PyPI's CUDA build of torch, about 0.5 GB with a CPU wheel ($(VENV): about 2 GB)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

# Serve questions about one document cold and warm, compare every logit, print and plot the times.
demo: setup
	@echo "demo: python -m experiments.warm_start"
	@$(BIN)/python -m experiments.warm_start

# Lint, type check, all tests, the Triton kernels interpreted and compiled for every GPU.
test: setup lint unit interpreter aot

# ruff and mypy.
lint: setup
	@echo "lint: ruff check, ruff format --check, mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

# The tests, one torch thread each, two processes.
unit: setup
	@echo "unit: pytest on two processes"
	@$(BIN)/python -m pytest -n 2 --dist worksteal

# The Triton kernels, run by Triton's interpreter: needs no GPU.
interpreter: setup
	@echo "interpreter: pytest tests/interpreter on two processes"
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/interpreter

# Compile every Triton kernel for sm_80, sm_90, sm_100 and gfx942; fail on spills. Needs no GPU.
aot: setup
	@echo "aot: compiling every kernel for every target"
	@$(BIN)/python -m experiments.aot --quiet

# On a GPU machine, with its own Python: check and time every kernel (under five minutes).
gpu-check:
	@$(PYTHON) -m experiments.gpu_check

# Break the code on purpose, one line at a time, and see the tests notice.
mutations: setup
	@$(BIN)/python -m tests.mutations

# Compare with transformers, with a bare prefill and with a plain copy on this CPU (minutes).
bench: setup
	@$(BIN)/python -m experiments.bench_cpu

# All experiments with the built-in model at a small size, into build/experiments (minutes).
EXPERIMENTS := recall_accuracy semantic_drift ttft_vs_prefix stride_sweep concurrency multi_turn restore_cost mtp
experiments: setup
	@$(BIN)/python -m experiments.warm_start --json build/experiments/warm_start.json
	@for name in $(EXPERIMENTS); do \
		echo "experiments: python -m experiments.$$name --small"; \
		$(BIN)/python -m experiments.$$name --small --json build/experiments/$$name.json || exit 1; \
	done

# Ask a real server with OpenAI's client package and GuideLLM: do hits arrive, is a token changed? (minutes)
regression: $(REGRESSION_STAMP)
	@$(BIN)/python -m experiments.regression

$(REGRESSION_STAMP): requirements-regression.txt $(STAMP)
	@echo "regression: installing requirements-regression.txt"
	@$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-regression.txt
	@touch $@

# Redraw every plot from the committed JSON, measuring nothing.
figures: setup
	@$(BIN)/python -m experiments.figures

# Train the built-in model and its draft head again (an hour or more; Ctrl-C saves, --resume goes on).
train: setup
	@$(BIN)/python -m experiments.train_recall --out build/builtin_model
	@$(BIN)/python -m experiments.train_draft_head --model build/builtin_model

# Copy the request traces from TRACES=DIR into build/traces (licences: experiments/README.md).
traces:
	@test -n "$(TRACES)" || { echo "traces: say where they are: make traces TRACES=DIR"; exit 2; }
	@mkdir -p build/traces
	@cp "$(TRACES)/claude_code_sessions.jsonl.gz" "$(TRACES)/mooncake_conversation_trace.jsonl" build/traces/
	@echo "traces: in build/traces"

# Remove everything that make made.
clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
