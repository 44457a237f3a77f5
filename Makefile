# Two commands do everything: `make train` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where PyPI's torch would be a CUDA build of several gigabytes, constraints.txt decides.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
# pip would do it in one process. Some packages have files that are no Python 3.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
STEPS ?= 250
RANKS ?= 2
JOBS ?= 2
# Processes that run tests side by side; much of the time tests wait for jobs that start.
WORKERS ?= 2
DEEPSPEEDS ?= 0.18.9 0.17.6
CONFIG ?= configs/zero3_galore.json

.PHONY: train test lint typecheck docs operator unit compat crashtest fuzz bench bench-quick quality clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: setup.py constraints.txt ds_galore/checkpoint/codecs/compiled.c | $(BIN)/python
	$(PIP) torch
	$(PIP) --editable '.[train]'
	$(COMPILE)
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) --editable '.[train,dev]'
	$(COMPILE)
	touch $@

train: $(VENV)/.run
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/deepspeed --num_accelerators $(RANKS) launch/train.py --config $(CONFIG) --model tiny --steps $(STEPS) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky --builder html docs build/docs

unit: $(VENV)/.dev
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'not crashtest and not timed' $(ARGS)
	$(BIN)/python -m pytest -m 'timed and not crashtest' $(ARGS) || test $$? -eq 5  # 5: none among those chosen

# The core tests, which tests/compat.txt names, with the newest of the minor releases of DeepSpeed before the pinned one;
# and those of tests/compat-<version>.txt.
compat: $(VENV)/.dev
	for version in $(DEEPSPEEDS); do \
		there="$(CURDIR)/build/deepspeed-$$version"; \
		test -d "$$there" || $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target "$$there" "deepspeed==$$version" || exit 1; \
		PYTHONPATH="$$there" TORCH_EXTENSIONS_DIR="$(CURDIR)/build/extensions-$$version" \
			$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal \
			$$(printf '@%s ' $$(ls tests/compat.txt tests/compat-$$version.txt 2>/dev/null)) $(ARGS) || exit 1; \
	done

fuzz: $(VENV)/.dev
	DS_GALORE_FUZZ=500 $(BIN)/python -m pytest tests/tools/test_fuzz.py -q

crashtest: $(VENV)/.dev
	$(BIN)/python -m pytest tests/checkpoint -m crashtest -q

# What DeepSpeed compiles at its first start on CPUs, for all the tests that start jobs.
operator: $(VENV)/.dev
	TORCH_EXTENSIONS_DIR="$(CURDIR)/build/extensions" PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -c \
		'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()' >/dev/null

# The first four side by side.
test: $(VENV)/.dev
	$(MAKE) --jobs 2 --output-sync=target lint typecheck docs operator
	$(MAKE) unit
	$(MAKE) bench-quick

# A job of so many ranks, one thread each.
JOB := PATH="$(abspath $(BIN)):$$PATH" TORCH_EXTENSIONS_DIR="$(CURDIR)/build/extensions" OMP_NUM_THREADS=1 $(BIN)/deepspeed --num_accelerators

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --editable '.[bench]'
	$(COMPILE)
	touch $@

# Beside others, in turns; docs/benchmarks.md is made of the results. A target that is missed does not stop the rest.
# About an hour and a half on two idle cores; what is measured stays in runs/bench, and report.py takes what is there.
bench: $(VENV)/.bench
	-$(BIN)/python benchmarks/refresh.py
	-$(BIN)/python benchmarks/step.py
	-$(BIN)/python benchmarks/codecs.py
	for ranks in 2 3 4; do \
		$(JOB) $$ranks benchmarks/zero.py --shape 60m || exit 1; \
		$(JOB) $$ranks benchmarks/zero.py --shape 1b --layers 1 --rounds 5 || exit 1; \
	done
	for ranks in 1 2 4; do $(JOB) $$ranks benchmarks/planner.py || exit 1; done
	$(BIN)/python benchmarks/planner.py --planned
	for row in galore staggered decay 8bit adamw stall stall-adamw load load-adamw; do \
		$(JOB) 2 benchmarks/checkpoints.py --row $$row || exit 1; \
	done
	$(JOB) 2 benchmarks/checkpoints.py --row stall-adamw --hidden 1024
	$(JOB) 2 benchmarks/merge.py --make runs/bench-merge
	$(BIN)/python benchmarks/merge.py --compare runs/bench-merge
	$(JOB) 2 benchmarks/growth.py
	$(BIN)/python benchmarks/quality.py --models tiny --rules AdamW GaLoreAdamW GaLoreAdamW8bit 'galore-torch GaLoreAdamW'
	$(BIN)/python benchmarks/report.py

# Whether they still run; nothing is judged, and nothing is kept. DeepSpeed's Muon would be compiled for a minute.
bench-quick: $(VENV)/.dev
	$(BIN)/python benchmarks/quick.py refresh step codecs 'gpu_check --device cpu' 'planner --planned'
	rm -rf build/bench-quick
	TORCHDYNAMO_DISABLE=1 $(JOB) 2 benchmarks/quick.py zero planner lowrank_gradients 'checkpoints --row galore --directory build/bench-quick' \
		'checkpoints --row stall --directory build/bench-quick' 'checkpoints --row load --directory build/bench-quick' \
		'growth --directory build/bench-quick' 'merge --make build/bench-quick/merge'
	$(BIN)/python benchmarks/merge.py --quick --compare build/bench-quick/merge

# About 45 minutes on two idle cores; what is finished is kept, and an interrupted table goes on.
quality: $(VENV)/.dev
	$(BIN)/python benchmarks/quality.py --jobs $(JOBS) $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info
