PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto
# of `make gpu-test`: each takes several GB of the GPU's memory
GPU_WORKERS ?= 12

# which mutants `make mutants` plants; a stopped run goes on where it was
SAMPLE ?= --seed 0 --count 60

# what `make emulate` runs, and what draws the order of warps and the delays of copies
TESTS ?= tests/decode/test_latent_gpu.py
SEED ?= 1

# what `make gpu-bench` measures and where it leaves the results
SUITES ?= founding
RESULTS ?= bsk-results

.PHONY: emulate quickstart test test-all docs docs-check pages dist compile-releases fuzz peer-tests vllm-test sglang-test xformers-test lint format mutants gpu-test gpu-soak gpu-fuzz gpu-sanitize gpu-bench browser clean help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

quickstart: $(VENV)/.installed  ## install, then compare with torch on this machine and write quickstart.json
	$(BIN)/python -m blackwell_sparsek.bench.quickstart --json quickstart.json

test: $(VENV)/.installed-test lint  ## lint, type check and the tests that need neither a GPU nor patience
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q -m "not gpu and not exhaustive"

test-all: $(VENV)/.installed-test lint  ## the same and the exhaustive tests, some of which need the network
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q -m "not gpu"

docs: $(VENV)/.installed-docs  ## the documentation site, into site/; any warning or dead link fails
	NO_MKDOCS_2_WARNING=1 PATH="$(BIN):$$PATH" $(BIN)/mkdocs build --strict --quiet

docs-check: docs  ## the site, and every page of it looked at in Chromium, wide and narrow
	$(BIN)/python -m tests.tools.check_site site

dist: $(VENV)/.installed-release  ## wheel and source archive, into dist/, checked as a package index would
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m tests.tools.check_dist dist

compile-releases: $(VENV)/.installed-test  ## a kernel of each kind for sm_90 with every Triton that is supported
	$(BIN)/python -m pytest -n $(WORKERS) -q tests/testing/test_releases.py

pages: $(VENV)/.installed  ## write figures, plots and support tables from benchmarks/results into README.md and docs/
	$(BIN)/python -m blackwell_sparsek.bench.report.pages
	$(BIN)/python benchmarks/context_parallel_model.py --write
	$(BIN)/python benchmarks/fp8_accuracy.py --write

fuzz: $(VENV)/.installed-test  ## ten minutes of random calls against a second oracle, without a GPU
	TRITON_INTERPRET=1 $(BIN)/python -m blackwell_sparsek.testing.fuzz --device cpu \
		--calls 100000 --seconds 600 --jobs 2 --corpus tests/testing/fuzz_corpus.txt

peer-tests: $(VENV)/.installed-test  ## suites of transformers and torch with this package and without
	$(BIN)/python -m pip install --quiet --constraint constraints.txt parameterized datasets expecttest
	$(BIN)/python -m tests.peers.run --workers 4

vllm-test: $(VENV)/.installed-test  ## the backend for vLLM with vLLM's own classes; downloads its wheel
	$(BIN)/python tests/integrations/unpack_vllm.py $(VENV)/vllm
	PYTHONPATH=src:$(VENV)/vllm $(BIN)/python -m pytest -q tests/integrations/test_vllm.py

sglang-test: $(VENV)/.installed-test  ## the backend for SGLang with SGLang's own classes; downloads its wheel
	$(BIN)/python tests/integrations/unpack_sglang.py $(VENV)/sglang
	PYTHONPATH=src:$(VENV)/sglang $(BIN)/python -m pytest -q tests/integrations/test_sglang.py

xformers-test: $(VENV)/.installed-test  ## the front end for xFormers with xFormers' own classes; downloads its wheel
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/xformers xformers==0.0.35
	PYTHONPATH=src:$(VENV)/xformers $(BIN)/python -m pytest -q tests/integrations/test_xformers.py

lint: $(VENV)/.installed-test  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-test  ## rewrite the sources the way `lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: $(VENV)/.installed-test  ## plant small faults and see whether tests notice; SAMPLE="--seed 1 --count 90"
	$(BIN)/python -m tests.tools.mutants $(SAMPLE)

emulate: $(VENV)/.installed-test  ## GPU tests of Hopper kernels in an emulator; TESTS=tests/decode SEED=1
	BSK_EMULATE=$(SEED) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q -m sm90 $(TESTS)

gpu-test:  ## the tests that need a GPU, with the packages of this machine's Python
	BSK_REQUIRE_GPU=1 PYTHONPATH=src $(PYTHON) -m pytest -n $(GPU_WORKERS) --dist worksteal -q \
		-p blackwell_sparsek.testing.failures -m gpu tests

gpu-soak:  ## a million calls from threads, streams, graphs and two processes; any other bit fails
	PYTHONPATH=src $(PYTHON) -m blackwell_sparsek.testing.soak --minutes 20 --calls 1000000

gpu-fuzz:  ## 2,500 random calls on the GPU against a second oracle; failing seeds join the corpus
	PYTHONPATH=src $(PYTHON) -m blackwell_sparsek.testing.fuzz --device cuda \
		--calls 2500 --jobs 8 --corpus tests/testing/fuzz_corpus.txt

gpu-sanitize:  ## compute-sanitizer over one call of every kernel and its replayed launch
	PYTHONPATH=src $(PYTHON) -m blackwell_sparsek.testing.sanitize --jobs 8 --logs sanitizer-logs

gpu-bench:  ## measure on this machine's GPU; fails when something is slower than the committed results
	PYTHONPATH=src $(PYTHON) -m blackwell_sparsek bench $(SUITES) -o $(RESULTS)
	PYTHONPATH=src $(PYTHON) -m blackwell_sparsek compare benchmarks/results $(RESULTS)

browser:  ## Debian's Chromium, in which the report is tested; needs root
	command -v chromium || (apt-get update -q && apt-get install -y -q chromium)

clean:  ## remove the environment and caches
	rm -rf $(VENV) $(RESULTS) site dist .peers sanitizer-logs .pytest_cache .mypy_cache .ruff_cache .hypothesis quickstart.json mutants.jsonl

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-release: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	touch $(VENV)/.installed $@
