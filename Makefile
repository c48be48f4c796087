# make demo: fine-tune a pretrained chat model, through a kill, and ask it (WORDS='--seed 7': with these flags).
# make gpu-folder: .gpu, what scripts/gpu_suite.sh needs on a machine without network or compiler (docs/benchmarks/gpu.md).
# make test: what a change can break, in five minutes on two cores (SEED=7: other cases of the matrices, other trials).
# make test-all: every test that this machine can run, and the lowest versions of all libraries; nightly, and before a
# release. Random trials use the date as seed; it is printed with the minutes that all took.
# Both set up what they need in .venv; a second run starts at once. PYTHON=python3.12 picks an interpreter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
test: SEED ?= 0
test-all: SEED ?= $(shell date +%Y%m%d)

.PHONY: demo gpu-folder test test-all check setup clean

demo: setup
	rm -rf demo-run
	$(RUN)/python scripts/demo.py demo-run $(WORDS)

gpu-folder: setup
	$(RUN)/python scripts/gpu_folder.py .gpu

# Each of some hundred processes would compile torch's and transformers' modules again, in 5 seconds.
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed's kernels name the environment they were built in: two that share a cache build each other's anew.
test test-all: export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch-extensions
test: setup check
	$(RUN)/python -m pytest -n 2 --dist worksteal --timeout 300 --seed $(SEED)

test-all: setup check
	date +%s > $(VENV)/started
	$(RUN)/python scripts/lowest_versions.py --install & $(RUN)/python scripts/build_kernels.py && wait $$!
	$(RUN)/python -m pytest -n 2 --dist worksteal --all --seed $(SEED) --durations=50
	$(RUN)/python scripts/lowest_versions.py
	@echo "test-all: green with seed $(SEED) after $$(( ($$(date +%s) - $$(cat $(VENV)/started)) / 60 )) minutes"

# A first mypy reads all of torch, on one core; the other compiles what tests import, or each process would.
check: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	[ $(VENV)/.imported -nt $(VENV)/.ready ] || $(RUN)/python -m pytest --collect-only -qq >$(VENV)/.imported & \
	$(RUN)/mypy && wait

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml scripts/setup.sh
	scripts/setup.sh $(PYTHON) $(VENV)
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest demo-run
