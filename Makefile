# `make` needs Python 3.11 or newer and nothing else; everything is installed into .venv/.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
BIN := .venv/bin
READY := .venv/.ready
DEMO := notebooks/101_ppo_by_hand.ipynb
# threads that wait take no core: see workbench/__init__.py; here also for notebooks that import torch first
export OMP_WAIT_POLICY ?= passive
export THP_MEM_ALLOC_ENABLE ?= 1

.PHONY: setup demo test fuzz lessons thorough margins lock drift cluster lab check format docs witnesses peers bench prove clean help

setup: $(READY) ## set up .venv/ (the default; quick when nothing changed)

$(READY): pyproject.toml scripts/setup_env.py $(wildcard scripts/constraints/*.txt)
	@$(PYTHON) scripts/setup_env.py
	@touch $@

demo: $(READY) ## run the first lesson on real models, headless; the result lands in runs/demo/
	WORKBENCH_WIDGETS=static $(BIN)/python scripts/run_notebook.py $(DEMO) runs/demo

JOBS ?= 2

TESTS := OMP_NUM_THREADS=1 $(BIN)/python scripts/run_tests.py -n $(JOBS)

test: $(READY) ## run the tests, JOBS processes at a time, each with one thread for torch; how: scripts/run_tests.py
	$(TESTS) --dist loadfile

CASES ?= 20000

fuzz: $(READY) ## call every public function with CASES of any arguments, and damage every byte of each kind of file
	OMP_NUM_THREADS=1 FUZZ_CASES=$(CASES) $(BIN)/python -m pytest -s tests/fuzz

lessons: $(READY) ## run every lesson at tiny settings, three of them against their scripts; or those of ONLY="101 or 304"
	$(TESTS) -m lesson $(if $(ONLY),-k "$(ONLY)") tests/notebooks tests/export/test_proof.py

thorough: $(READY) ## run what `make test` shows under further layouts, and every lesson against its script
	$(TESTS) --dist loadfile -m "thorough and not lesson"
	$(BIN)/python benchmarks/prove.py

OLD := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE MKL_ENABLE_INSTRUCTIONS=SSE4_2 DNNL_MAX_CPU_ISA=SSE41

margins: $(READY) ## how near comparisons of floats come to their tolerance, as this processor rounds and with old instructions
	rm -f runs/margins.jsonl runs/margins_old.jsonl
	MARGINS=runs/margins.jsonl $(TESTS) --dist loadfile -p tests.margins
	MARGINS=runs/margins_old.jsonl $(OLD) $(TESTS) --dist loadfile -p tests.margins $(QUICK)
	cat runs/margins.jsonl runs/margins_old.jsonl > runs/margins_both.jsonl
	$(BIN)/python -m tests.margins runs/margins_both.jsonl

lock: $(READY) ## write scripts/constraints/ anew: the newest versions that fit together in the ranges of pyproject.toml
	$(BIN)/python -m scripts.lock

# what needs no cluster, kernel or browser
QUICK := $(filter-out $(addprefix tests/,backends browser crash_points integration kernel notebooks),$(patsubst %/,%,$(wildcard tests/*/)))

drift: $(READY) ## install the newest versions that pyproject.toml allows, say which differ, and run the tests that need no cluster
	$(PYTHON) scripts/setup_env.py --newest
	$(BIN)/python -m scripts.lock --compare .venv-newest
	OMP_NUM_THREADS=1 .venv-newest/bin/python scripts/run_tests.py -n $(JOBS) --dist loadfile $(QUICK)

cluster: $(READY) ## machines on this one, to try a cluster: DO="up 3", "link m2 --rate 1gbit --delay 10ms", "kill m2", "down", "--help"
	@$(BIN)/python scripts/machines.py $(or $(DO),up 3)

lab: $(READY) ## open JupyterLab on the lessons
	$(BIN)/jupyter lab --notebook-dir=. $(DEMO)

check: $(READY) ## format, lint, layers of imports, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(READY) ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# folders whose modules have a page: what a user calls, reads or writes a subclass of
REFERENCE := algorithms batches checks comparisons conversations data errors export launch mapping messages models objectives placement resharding session settings stages support telemetry workers

docs: $(READY) ## write the API reference into build/docs/
	$(BIN)/python -W ignore -m pdoc -t docs/reference -o build/docs --footer-text workbench workbench workbench.cli workbench.controller $$(find $(REFERENCE:%=workbench/%) -name '*.py' | sed 's,/__init__,,; s,\.py$$,,; s,/,.,g')

WITNESSES := torchrl==0.14.1 tensordict==0.15.3 pyvers==0.2.3 importlib_metadata zipp verl==0.9.1 codetiming orjson omegaconf antlr4-python3-runtime==4.9.3

witnesses: $(READY) ## compare the pure functions with those of torchrl, verl and trl, installed into .witnesses/
	$(BIN)/pip install -q --upgrade --target .witnesses --no-deps $(WITNESSES) $(PEERS)
	$(BIN)/python benchmarks/witnesses.py

PEERS := trl==1.16.0 "datasets<5.3" pyarrow "multiprocess<0.70.20" xxhash "dill<0.4.2"

peers: $(READY) ## what speed is measured against, into .peers/; never imported by the product
	$(BIN)/pip install -q --upgrade --target .peers --no-deps $(PEERS)

bench: $(READY) ## measure: NAME=iteration (after `make peers`), ARGS="..."; without NAME, a list of the benchmarks
ifdef NAME
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)
else
	@$(BIN)/python benchmarks/list.py
endif

prove: $(READY) ## run every lesson and its exported script at small settings, and compare every metric
	$(BIN)/python benchmarks/prove.py

clean: ## remove .venv/ and what tools left behind; runs/ stays
	rm -rf .venv .venv-newest .peers .witnesses build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis

help: ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20
