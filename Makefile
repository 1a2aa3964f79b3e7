# `make` needs Python 3.11 or newer and nothing else; everything is installed into .venv/.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
BIN := .venv/bin
READY := .venv/.ready
DEMO := notebooks/101_ppo_by_hand.ipynb

.PHONY: setup demo test lessons thorough lab check format docs witnesses peers bench bench-overlap bench-control bench-forward bench-resharding bench-move bench-panel bench-mapping bench-interrupts bench-faults prove bench-learning clean help

setup: $(READY) ## set up .venv/ (the default; quick when nothing changed)

$(READY): pyproject.toml setup.py scripts/setup_env.py
	@$(PYTHON) scripts/setup_env.py
	@touch $@

demo: $(READY) ## run the first lesson on real models, headless; the result lands in runs/demo/
	@mkdir -p runs/demo
	@echo "running $(DEMO): about four minutes on two cores, and nothing is said before the end"
	WORKBENCH_WIDGETS=static $(BIN)/jupyter nbconvert --to notebook --execute $(DEMO) --output-dir runs/demo
	@echo "executed notebook: runs/demo/$(notdir $(DEMO))"

JOBS ?= 2

test: $(READY) ## run the tests, JOBS processes at a time; each with one thread for torch, and files as they are
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

lessons: $(READY) ## run every lesson at tiny settings, three of them against their scripts
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m lesson

thorough: $(READY) ## run what `make test` shows under further layouts, and every lesson against its script
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m thorough
	$(BIN)/python tests/benchmarks/prove.py

lab: $(READY) ## open JupyterLab on the lessons
	$(BIN)/jupyter lab --notebook-dir=. $(DEMO)

check: $(READY) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(READY) ## write the API reference into build/docs/
	$(BIN)/python scripts/build_docs.py

WITNESSES := torchrl==0.14.1 tensordict==0.15.3 pyvers==0.2.3 importlib_metadata zipp verl==0.9.1 codetiming orjson omegaconf antlr4-python3-runtime==4.9.3

witnesses: $(READY) ## compare the pure functions with those of torchrl, verl and trl, installed into .witnesses/
	$(BIN)/pip install -q --upgrade --target .witnesses --no-deps $(WITNESSES) $(PEERS)
	$(BIN)/python tests/witnesses/compare.py

PEERS := trl==1.16.0 "datasets<5.3" pyarrow "multiprocess<0.70.20" xxhash "dill<0.4.2"

peers: $(READY) ## what speed is measured against, into .peers/; never imported by the product
	$(BIN)/pip install -q --upgrade --target .peers --no-deps $(PEERS)

bench: $(READY) ## measure speed: one GRPO-like iteration against TRL (after `make peers`)
	$(BIN)/python tests/benchmarks/grpo_against_trl.py

bench-overlap: $(READY) ## measure what overlapping the stages of two pools gains
	$(BIN)/python tests/benchmarks/overlap.py

bench-control: $(READY) ## measure what the controller adds to a stage, by ranks and by rows
	$(BIN)/python tests/benchmarks/control_cost.py

bench-forward: $(READY) ## measure packed against padded passes, and log-probabilities against whole logits
	$(BIN)/python tests/benchmarks/forward.py

bench-resharding: $(READY) ## measure bytes and seconds of the three transitions, by model and by ranks
	$(BIN)/python tests/benchmarks/resharding.py

bench-move: $(READY) ## measure a move of an actor with its optimizer against a plain copy
	$(BIN)/python tests/benchmarks/move.py

bench-panel: $(READY) ## measure the timeline of a live panel in a browser, and what a panel costs a run
	$(BIN)/python tests/benchmarks/panel.py

bench-mapping: $(READY) ## hold the cost model to published measurements, to this machine, and the search to a clock
	$(BIN)/python tests/benchmarks/mapping_published.py
	$(BIN)/python tests/benchmarks/mapping_speed.py
	$(BIN)/python tests/benchmarks/mapping_measured.py --model smollm2-135m --rows 8 --tokens 24

bench-interrupts: $(READY) ## interrupt every stage at random moments, 200 times, in a real kernel
	$(BIN)/python tests/benchmarks/interrupts.py

bench-faults: $(READY) ## the fault matrix: kill a worker, kill the kernel, interrupt, in each stage
	$(BIN)/python tests/benchmarks/faults.py

prove: $(READY) ## run every lesson and its exported script at small settings, and compare every metric
	$(BIN)/python tests/benchmarks/prove.py

bench-learning: $(READY) ## measure whether GRPO, PPO and Safe-RLHF learn (hours); PAIRS=file.jsonl adds reward model and DPO
	$(BIN)/python tests/benchmarks/learning.py grpo
	$(BIN)/python tests/benchmarks/learning.py ppo
	$(BIN)/python tests/benchmarks/learning.py safe_rlhf
	$(if $(PAIRS),$(BIN)/python tests/benchmarks/reward_model.py $(PAIRS))
	$(if $(PAIRS),$(BIN)/python tests/benchmarks/dpo.py $(PAIRS))

clean: ## remove .venv/ and what tools left behind; runs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

help: ## list these targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20
