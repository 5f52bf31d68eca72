# `make demo` and `make test` do all the set-up on a machine with Python 3.11 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PIN := $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)

.PHONY: setup demo test test-fast test-torch test-oldest nightly check check-install check-resolve schema browser policies policies-check fmt bench bench-plans bench-minimum bench-public bench-public-steps bench-peak bench-observed bench-compiled bench-profile bench-streams bench-moves bench-loops bench-below-minimum bench-nested bench-use-groups bench-unseen bench-collectives bench-ranks bench-placements bench-block-bounds bench-random-plans bench-offload bench-predictions bench-fit bench-splitting clean

setup: $(READY)

demo: $(READY)
	$(BIN)/autoac demo

# In two processes: many tests wait for children, ranks or a database. Each takes one half of the tests, in
# order, so that few fixtures are made in both; the one that is done first takes from the other.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=25

# Chromium for the tests of pages, from the system's packages (Debian, Ubuntu). Needs root.
browser:
	command -v chromium || command -v chromium-browser || command -v google-chrome || { apt-get update && apt-get install -y chromium chromium-driver; }

# The wheel in an empty environment, without our constraints: what a newcomer gets. A few minutes.
check-install: $(READY)
	$(BIN)/python tools/check_install.py "$(PIN)"

# Planner and service without torch, and without the tests marked `slow`: 45 seconds on two idle cores.
test-fast: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/planner tests/api -m "not slow"

# The suite under another torch, in an environment of its own which sees the other packages of $(VENV):
#   make test-torch TORCH=2.14.1 TESTS=tests/client/runtime
# A CPU build needs no CUDA libraries: PIP_EXTRA_INDEX_URL, or a wheel in pip's --find-links.
TORCH ?= $(patsubst torch==%,%,$(PIN))
TORCH_VENV := build/torch-$(TORCH)
test-torch: $(READY)
	test -x $(TORCH_VENV)/bin/python || $(BIN)/python -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check -qq install "torch==$(TORCH)" "setuptools>=80"
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$(echo $(TORCH_VENV)/lib/python3.*/site-packages)/zz_base.pth
	$(TORCH_VENV)/bin/python -c 'import torch; print("torch", torch.__version__); assert torch.__version__.startswith("$(TORCH)")'
	PATH="$(CURDIR)/$(BIN):$$PATH" $(TORCH_VENV)/bin/python -m pytest -n 2 --dist worksteal --durations=25 $(TESTS)

# Planner, service and commands with the oldest releases that pyproject.toml allows of what is released often.
OLDEST_VENV := build/oldest
OLDEST := "(numpy|pydantic|typer|anyio|rich|tenacity|zstandard|xxhash|lazy-loader|pulp|highspy|httpx2)>=[0-9.]+
test-oldest: $(READY)
	test -x $(OLDEST_VENV)/bin/python || $(BIN)/python -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install "click<8.2" $$(grep -oE '$(OLDEST)' pyproject.toml | tr -d '"' | sed 's/>=/==/')
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$(echo $(OLDEST_VENV)/lib/python3.*/site-packages)/zz_base.pth
	PATH="$(CURDIR)/$(BIN):$$PATH" $(OLDEST_VENV)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" -k "not command_line_is_light" tests/planner tests/api tests/client/cli tests/client/test_light_client.py

# Which releases of the libraries of training go with autoac: resolved by uv, and not installed. Five minutes.
check-resolve: $(READY)
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip --disable-pip-version-check -qq install uv
	$(BIN)/python tools/check_resolve.py build/uv/bin/uv

# The fuzzer on 3,000 programs, the op sweep on every sample, the zoo on the stand-in device: an hour or so.
nightly: $(READY)
	AUTOAC_PROGRAMS=3000 AUTOAC_OP_SAMPLES=all $(BIN)/python -m pytest tests/client/runtime/test_programs.py tests/client/runtime/test_ops.py
	AUTOAC_ZOO=all $(BIN)/python -m pytest tests/standin/test_peaks.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/lint_english.py

# Policies of the example models: plan them; or, like CI, fail if a stored one is out of date.
policies: $(READY)
	$(BIN)/autoac regenerate --config examples/regenerate/autoac.toml

policies-check: $(READY)
	$(BIN)/autoac regenerate --config examples/regenerate/autoac.toml --check

# JSON Schema of policies, for editors and for checks without Python.
schema: $(READY)
	$(BIN)/python -c 'from autoac.planner.formats.policy import json_schema; print(json_schema(), end="")' > planner/formats/policy.schema.json

fmt: $(READY)
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.shapes

# These print Markdown; run the modules with --out FILE or --page FILE to write it (docs/measurements.md).

# Our plans and nine baselines on large models: hours; a second run continues where the first stopped.
bench-plans: $(READY)
	$(BIN)/python -m benchmarks.plans

# Plans a little above the minimum peak: how soon there is one, and how soon it is good. Half an hour.
bench-minimum: $(READY)
	$(BIN)/python -m benchmarks.plans.near_minimum

# Planners on identical graphs, judged by an independent checker; GRAPHS names files or folders with more graphs.
bench-public: $(READY)
	$(BIN)/python -m benchmarks.public $(GRAPHS) $(if $(PAGE),--page $(PAGE))

# Real steps at equal measured peak: ours and torch's ways to recompute; a quarter of an hour.
bench-public-steps: $(READY)
	$(BIN)/python -m benchmarks.public.training --out build/bench/public/steps.md

# Predicted and measured peak of the zoo's models, optimizer included: a quarter of an hour.
bench-peak: $(READY)
	$(BIN)/python -m benchmarks.peak

# A first step without a profile: peaks and numbers, over 53 models. Five minutes.
bench-observed: $(READY)
	$(BIN)/python -m benchmarks.observed_step
	$(BIN)/python -m benchmarks.observed_profile

# Compiled models: predicted and measured peaks and gradients, then next to activation_memory_budget: an hour.
bench-compiled: $(READY)
	$(BIN)/python -m benchmarks.compiled_peaks
	$(BIN)/python -m benchmarks.inductor_peaks
	$(BIN)/python -m benchmarks.compiled_blocks
	$(BIN)/python -m benchmarks.memory_budget_knob

# Time of a profile, predicted and measured recompute time: half an hour.
bench-profile: $(READY)
	$(BIN)/python -m benchmarks.recompute_time

# 1,000 random programs on several streams, on the stand-in at its worst timing: a few minutes.
bench-streams: $(READY)
	PYTHONPATH=tests $(BIN)/python -m standin.worst_timing

# 1,000 random programs that move outputs to the host, on the stand-in: some minutes.
bench-moves: $(READY)
	PYTHONPATH=tests $(BIN)/python -m standin.worst_timing moves

# 1,000 random training loops on the stand-in and 300 on a CPU, then the written ones and pipelines: hours.
bench-loops: $(READY)
	$(BIN)/python -m benchmarks.loops --random 1000 --on standin
	$(BIN)/python -m benchmarks.loops --random 300
	$(BIN)/python -m benchmarks.loops --on standin
	$(BIN)/python -m benchmarks.loops --pipelines

# Six models below the smallest peak of recompute alone, between two arenas of a CPU and on the stand-in.
bench-below-minimum: $(READY)
	$(BIN)/python -m benchmarks.below_minimum
	PYTHONPATH=tests $(BIN)/python -m standin.worst_timing below-minimum

# 1,000 random nestings of checkpoint, ours next to torch's: some minutes.
bench-nested: $(READY)
	PYTHONPATH=tests $(BIN)/python -m fuzzers.nested_checkpoints

# 1,000 random networks under random policies with recompute@2: ops, peak and gradients. Some minutes.
bench-use-groups: $(READY)
	PYTHONPATH=tests $(BIN)/python -m fuzzers.use_groups

# 2,000 random networks with kernels that PyTorch does not dispatch, in all our ways: half an hour.
bench-unseen: $(READY)
	PYTHONPATH=tests $(BIN)/python -m fuzzers.unseen_kernels

# 300 random programs over DTensors on one rank, and 100 on two: gradients. A minute.
bench-placements: $(READY)
	PYTHONPATH=tests $(BIN)/python -m fuzzers.placements

# The ways to use several ranks: numbers, collectives, and peaks next to checkpoint's. Some minutes.
bench-ranks: $(READY)
	PYTHONPATH=tests $(BIN)/python -m rank_setups

# Every collective on two and four ranks, recomputed around in every way, and 500 plans of experts: half an hour.
bench-collectives: $(READY)
	PYTHONPATH=tests $(BIN)/python -m fuzzers.collectives

# Bounds of the program over blocks, of 4,000 small random graphs, next to brute force: some minutes.
bench-block-bounds: $(READY)
	PYTHONPATH=tests/planner $(BIN)/python -m block_bounds

# What a link to the host is worth, by datasheets of an H100: a quarter of an hour.
bench-offload: $(READY)
	$(BIN)/python -m benchmarks.offload

# Plans and bounds of 4,000 small random graphs, next to brute force: some minutes.
bench-random-plans: $(READY)
	PYTHONPATH=tests/planner $(BIN)/python -m random_plans

# Predicted peaks of published runs on clusters and single GPUs: docs/predictions.md. Ten minutes.
bench-predictions: $(READY)
	$(BIN)/python -m benchmarks.predictions --out docs/predictions.md

# `fit` next to real steps of 27 models on the CPU: the largest batch, and peaks of sizes. Half an hour.
bench-fit: $(READY)
	$(BIN)/python -m benchmarks.fit

# What `fit` says of micro-batches, next to measured steps on the CPU: a quarter of an hour.
bench-splitting: $(READY)
	$(BIN)/python -m benchmarks.splitting

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first and by itself, so that pip takes the CPU build where an index has one.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autoac needs Python 3.11 or newer; set PYTHON=")'
	@echo "setting up $(VENV): a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --constraint constraints.txt "$(PIN)"
	@$(PIP) install --constraint constraints.txt --editable ".[dev]"
	@touch $@
