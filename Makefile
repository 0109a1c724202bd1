# make demo   the whole pipeline on real data, on this machine
# make test   the test suite
# Both make .venv from the hash-pinned lock first. Needs Python 3.11 or 3.12 and nothing else.
#
# make image        the container image; VARIANT=cpu leaves CUDA out. Needs a Docker engine
# make image-test   builds the CPU variant and tries it
# make audit        known vulnerabilities of what is in the image

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROOT ?= output

VARIANT ?= gpu
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Of a commit, or of a commit and what was changed since; nothing where this is no checkout.
REVISION = $(shell [ -e .git ] && head=$$(git rev-parse HEAD 2>/dev/null) && \
  echo "$$head$$(git diff --quiet HEAD || echo -modified)")
CODE_DIGEST = $(shell $(PYTHON) -c 'from trainer.provenance import source; print(source()["digest"])')

.PHONY: demo test lint schema image image-test variant audit lock lock-check clean

demo: $(VENV)/installed
	$(BIN)/trireme run configs/digits.yaml --root $(ROOT)

test: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -m "not image" --numprocesses logical --maxprocesses 4 --dist loadfile

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

# The configurations' default image is the variant that was built here last. The lists of what is in it go to dist/.
image: variant
	docker build --build-arg VARIANT=$(VARIANT) --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) \
	  --build-arg CODE_DIGEST=$(CODE_DIGEST) --tag trireme:$(VERSION)-$(VARIANT) --tag trireme:$(VERSION) .
	mkdir -p dist
	for kind in python debian; do \
	  docker run --rm trireme:$(VERSION)-$(VARIANT) cat /opt/sbom/$$kind.cdx.json \
	    > dist/trireme-$(VERSION)-$(VARIANT).$$kind.cdx.json || exit 1; \
	done

variant:
	@case "$(VARIANT)" in gpu|cpu) ;; *) echo "VARIANT = $(VARIANT): must be gpu or cpu" >&2; exit 2 ;; esac

image-test: $(VENV)/installed
	$(MAKE) image VARIANT=cpu
	$(BIN)/python -m pytest tests/test_image.py tests/test_image_runs.py

# Asks PyPI's database of vulnerabilities about each pinned package; installs and resolves nothing. Fails where a package
# is vulnerable, and where the index keeps no such database, as mirrors do.
audit: variant $(VENV)-image/installed
	@$(VENV)-image/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements/$(VARIANT).txt || { \
	  echo "NOT audited clean. If a package is vulnerable, it is named above. If one is said not to be found on PyPI, the" \
	    "index that was asked keeps no database of vulnerabilities and nothing was audited: ask PyPI itself." >&2; exit 1; }

$(VENV)-image/installed: requirements/image.txt
	$(PYTHON) -m venv $(VENV)-image
	$(VENV)-image/bin/pip install --quiet --no-input --disable-pip-version-check --require-hashes -r $<
	touch $@

UV = $(VENV)-lock/bin/uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_36 --generate-hashes \
  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --quiet

# Resolves the locks anew from pyproject.toml; they name no index.
lock: $(VENV)-lock/installed
	for extra in cpu gpu dev; do \
	  $(UV) pyproject.toml --extra $$extra --upgrade -o requirements/$$extra.txt || exit 1; \
	done
	$(UV) --group pyproject.toml:image --upgrade -o requirements/image.txt

lock-check: $(VENV)-lock/installed
	@.ci/check-locks $(UV)

$(VENV)-lock/installed: Makefile
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet --disable-pip-version-check uv==0.13.9
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-image $(VENV)-lock build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
