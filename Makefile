# make demo   the whole pipeline on real data, on this machine
# make test   the test suite
# Both make .venv from the hash-pinned lock first. Needs Python 3.11 or 3.12 and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT ?= output

.PHONY: demo test lint schema lock clean

demo: $(VENV)/installed
	$(BIN)/trireme run configs/digits.yaml --root $(ROOT)

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The JSON Schema that the files in configs/ point editors at.
schema: $(VENV)/installed
	$(BIN)/trireme schema > configs/schema.json

$(VENV)/installed: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-input --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/pip install --quiet --no-input --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# Resolves the locks anew from pyproject.toml; they name no index.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet uv==0.13.9
	for extras in cpu gpu dev; do \
	  $(VENV)-lock/bin/uv pip compile pyproject.toml --extra $$extras --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_36 --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --custom-compile-command "make lock" --upgrade --quiet -o requirements/$$extras.txt || exit 1; \
	done
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
