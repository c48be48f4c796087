# make demo: train the default model end to end (WORDS='--steps 100': with these).   make test: everything that can be
# tested on this machine.
# Both set up what they need in .venv; a second run starts at once. PYTHON=python3.12 picks an interpreter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test check setup clean

demo: setup
	$(RUN)/python scripts/demo.py $(WORDS)

# DeepSpeed's kernels name the environment they were built in: two that share a cache build each other's anew.
test: export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/torch-extensions
test: setup check
	$(RUN)/python scripts/lowest_versions.py --install & $(RUN)/python scripts/build_kernels.py && wait $$!
	$(RUN)/python -m pytest -n 2 --dist worksteal
	$(RUN)/python scripts/lowest_versions.py

check: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.lock pyproject.toml scripts/setup.sh
	scripts/setup.sh $(PYTHON) $(VENV)
	touch $@

clean:
	rm -rf $(VENV) .venv-lowest demo-run
