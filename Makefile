# Everything runs in .venv, which the first target that needs it makes and fills.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

# What .venv is filled with at first; the docs' tools come with the first target that needs them.
EXTRAS ?= runtime,test,check

# One test process per core, each with one thread: teams of threads that outnumber the cores wait for each other.  Each
# gets tests that stand together, which share what they build, and those that are left when another has none.  Tests
# start hundreds of processes: what they import is compiled once, also where the environment says not to keep it.
WORKERS ?= auto

# The stamp is written when the installation is complete, and holds the folder that it was made for: without a stamp,
# or in a folder that was moved, the environment is made anew.
STAMP := $(VENV)/complete
BENCH_STAMP := $(VENV)/complete-bench
DOCS_STAMP := $(VENV)/complete-docs
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(shell rm -f $(STAMP))
endif

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

.PHONY: demo
demo: $(STAMP) ## Search a plan, carry it out, lay prediction and reality over each other (out/demo/report.html)
	$(BIN)/python -m protwin.calibration.demos.demo

.PHONY: demo-ranks
demo-ranks: $(STAMP) ## The same on two processes: a plan for both, trained by both, beside DDP (out/demo-ranks/report.html)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 \
		-m protwin.calibration.demos.demo_ranks

.PHONY: demo-bypass
demo-bypass: $(STAMP) ## A student learns from its teacher block by block, under a budget for neither (out/demo-bypass/report.html)
	$(BIN)/python -m protwin.calibration.demos.demo_bypass

.PHONY: demo-osft
demo-osft: $(STAMP) ## A second text is learned whole, by LoRA and by OSFT under one budget: what each forgets (out/demo-osft/report.html)
	$(BIN)/python -m protwin.calibration.demos.demo_osft

.PHONY: demo-long
demo-long: $(STAMP) ## A sequence that needs six times the budget, trained in tiles (out/demo-long/report.html)
	$(BIN)/python -m protwin.calibration.demos.demo_long

.PHONY: demo-all
demo-all: $(STAMP) ## LoRA on long sequences on two processes, a distillation, OSFT of the student (out/demo-all/report.html)
	$(BIN)/python -m protwin.calibration.demos.demo_all

.PHONY: test
test: $(STAMP) ## Run the tests (ARGS="-k name" for some of them)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 25 --durations-min 2 $(ARGS)

.PHONY: catalogue
catalogue: $(STAMP) ## Trace the catalogue's models anew (NAMES="gpt2 llama-3-8b" for some of them, with --tiles, --sharings or --adapters for a part)
	$(BIN)/python -m protwin.runtime.polynomials.regenerate_catalogue $(NAMES)

.PHONY: check
check: $(STAMP) ## Lint, format, types and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: docs
docs: $(DOCS_STAMP) ## Write the generated pages and build the site (out/site/index.html)
	$(BIN)/python docs/json_reference.py
	$(BIN)/python docs/command_reference.py
	$(BIN)/python docs/python_reference.py
	$(BIN)/python docs/combinations_page.py
	$(BIN)/python docs/constants_page.py
	$(BIN)/python docs/families_page.py
	$(BIN)/python docs/published_picture.py
	$(BIN)/python docs/results_page.py
	$(BIN)/python docs/iteration_picture.py
	$(BIN)/python -m mkdocs build --strict

.PHONY: bench
bench: bench-fidelity bench-search bench-commands bench-overhead bench-peers bench-predictors bench-forgetting ## Run all benchmarks

.PHONY: families
families: $(STAMP) ## Which model families train by a plan: a sweep of tiny ones, and docs/families.md anew
	$(BIN)/python -m benchmarks.families $(ARGS)
	$(BIN)/python docs/families_page.py

.PHONY: bench-fidelity
bench-fidelity: $(STAMP) ## Predicted against measured time and memory, over plans and models not fitted to
	$(BIN)/python -m benchmarks.fidelity $(ARGS)

.PHONY: bench-search
bench-search: $(STAMP) ## Seconds of searches, beside brute force and a vectorised evaluation of all plans
	$(BIN)/python benchmarks/search.py

.PHONY: bench-commands
bench-commands: $(STAMP) ## Time and memory of every command line in README and docs
	$(BIN)/python -m benchmarks.commands

.PHONY: bench-overhead
bench-overhead: $(STAMP) ## What the runtime costs beside the work that it must do
	$(BIN)/python benchmarks/overhead.py

.PHONY: bench-forgetting
bench-forgetting: $(STAMP) ## What a model forgets of one text while it learns another: whole, by LoRA and by OSFT
	$(BIN)/python -m benchmarks.forgetting $(ARGS)

# The public OSFT system asks for narrower versions than training needs, and runs without them; if it cannot be had, the
# table says so.
OSFT_PEER := rhai-innovation-mini-trainer==0.9.0 numba llvmlite datasets pyarrow pandas python-dateutil pytz tzdata six \
	dill multiprocess xxhash aiofiles deprecated wrapt

.PHONY: bench-peers
bench-peers: $(BENCH_STAMP) ## Step time, memory and losses of FSDP2, DeepSpeed (offload, tiles) and others, and of ours
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/peers_long.py
	-$(PIP) --quiet --no-deps $(OSFT_PEER)
	$(BIN)/python benchmarks/peers_osft.py

.PHONY: runtime-hooks
runtime-hooks: $(BENCH_STAMP) ## What hooks of FSDP, FSDP2, DDP and DeepSpeed take in Python, per module, parameter and block
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/runtime_hooks.py $(ARGS)

.PHONY: bench-predictors
# llm-analysis asks for older versions of what training needs, but runs without them; if it cannot be had, the table says so.
bench-predictors: $(STAMP) ## Memory and time that other predictors give for the same questions
	-$(PIP) --quiet --no-deps llm-analysis==0.2.2 fire termcolor
	$(BIN)/python benchmarks/predictors.py

.PHONY: recommendations
recommendations: $(STAMP) ## Thirty questions answered: which machine for which model (docs/fine-tune.md)
	$(BIN)/python -m benchmarks.recommendations

.PHONY: published
published: $(STAMP) ## Published training runs: prediction, measurement, signed error
	$(BIN)/python -m protwin.calibration.published.report --fidelity $(lastword $(sort $(wildcard benchmarks/results/fidelity-*.json))) $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(STAMP) ## The proof and the fidelity of predictions on a GPU, in under eight minutes (exit code 2 without)
	$(BIN)/python benchmarks/gpu.py

.PHONY: bench-sheets
bench-sheets: $(STAMP) ## Plain trainings and kernels on a GPU, beside what its data sheet predicts (exit code 2 without)
	$(BIN)/python benchmarks/gpu_sheets.py && $(BIN)/python benchmarks/sheet_predictions.py "$$(ls -t benchmarks/results/sheets-*.json | head -n 1)"

.PHONY: prove
prove: $(STAMP) ## Prove the runtime: equality, memory, faults (ARGS="--only memory" for a part)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.prove $(ARGS)

.PHONY: clean
clean: ## Remove everything that can be made again, .venv included
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

KERNELS := $(wildcard sim/kernels/*.c sim/kernels/*.h)

$(STAMP): pyproject.toml constraints.txt setup.py $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "protwin needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3" >&2; exit 2; }
	@test -f $@ || rm -rf $(VENV)
	@rm -f $@
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip # Python 3.11's own takes twice the processor time for what follows
	$(PIP) --editable '.[$(EXTRAS)]'
	@printf '%s\n' '$(CURDIR)' > $@
	@$(if $(findstring docs,$(EXTRAS)),touch $(DOCS_STAMP),:)

$(DOCS_STAMP): $(STAMP)
	$(PIP) --editable '.[docs]'
	@touch $@

# A peer that cannot be installed or compiled is listed so by the bench; it does not keep the others from running.
$(BENCH_STAMP): $(STAMP)
	-$(PIP) --editable '.[bench]'
	$(BIN)/python benchmarks/peers.py --build
	@touch $@
