# Every target makes the environment it needs; CI runs nothing that is not a target.
# To use an environment of your own: make check PYTHON=/path/to/python

SYSTEM_PYTHON ?= python3
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
PYTEST_FLAGS ?=
FUZZ_SECONDS ?= 600
MUTATE_FLAGS ?=
BOUNDS_FLAGS ?= tests/accuracy tests/estimator tests/measured tests/memory
EQUAL_FLAGS ?=

# Where `make verify` has torch, and which: without a GPU its build for CPUs is enough.
VERIFY_VENV ?= $(VENV)-verify
TORCH ?= torch

# Interpreters that `make pythons` looks for.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14

# Paths that are linted and typed.
CODE = memplan tests benchmarks docs conftest.py setup.py
# Texts with generated blocks.
GENERATED = README.md docs/accuracy.md docs/calculators.md docs/commands.md docs/data.md docs/diffusion.md docs/engine-options.md docs/estimate.md \
  docs/fine-tuning.md docs/how-to-*.md docs/jobs.md docs/kernels.md docs/on-this-machine.md docs/optimizers.md docs/parallelism.md docs/pools-and-admission.md docs/presets.md docs/schedulers.md docs/scripts.md \
  docs/stack-keys.md docs/sweep-and-plan.md docs/time.md docs/tutorial.md docs/where-the-bytes-are.md

ifeq ($(PYTHON),$(VENV)/bin/python)
ENVIRONMENT = $(VENV)/.ready
else
ENVIRONMENT =
endif

.DEFAULT_GOAL := help
.PHONY: help fix check lint format types layers readme docs pictures site test test-pure sanitize verify newest schedulers pythons fuzz golden bench mutate bounds equal accuracy build clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# A new environment with a pip that knows --group: the pip at hand puts it there in half the time of Python's own copy.
define new_environment
	$(SYSTEM_PYTHON) -m venv --without-pip $(1)
	$(SYSTEM_PYTHON) -m pip --python $(1)/bin/python install --quiet --no-compile "pip>=25.1" \
	  || $(SYSTEM_PYTHON) -m venv --upgrade-deps $(1)
endef

# The compiled core is built where it lies, if it can be.
$(VENV)/.ready: pyproject.toml setup.py memplan/memory/_replay.c
	$(call new_environment,$(VENV))
	$(VENV)/bin/python -m pip install --quiet --no-compile --editable . --group dev  # imports compile what they need
	@$(VENV)/bin/python -m compileall -q -j 0 memplan || true  # not in each of the processes that begin together
	@touch $@

fix: $(ENVIRONMENT)  ## Rewrite what can be: formatting, simple lint, generated blocks of README.md and docs/
	$(PYTHON) -m ruff check --fix $(CODE)
	$(PYTHON) -m ruff format $(CODE)
	$(PYTHON) -m cogapp -r $(GENERATED)

check: lint format types layers readme  ## Lint, formatting, types, layers, generated blocks of README.md and docs/

lint: $(ENVIRONMENT)
	$(PYTHON) -m ruff check $(CODE)

format: $(ENVIRONMENT)
	$(PYTHON) -m ruff format --check $(CODE)

types: $(ENVIRONMENT)
	$(PYTHON) -m mypy

layers: $(ENVIRONMENT)
	$(PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

readme: $(ENVIRONMENT)
	$(PYTHON) -m cogapp --check $(GENERATED)

docs: $(ENVIRONMENT)  ## Build the documentation site into site/, warnings as errors
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

pictures: $(ENVIRONMENT)  ## Draw docs/pictures anew (takes minutes, and matplotlib)
	$(PYTHON) -m pip install --quiet --no-compile matplotlib
	$(PYTHON) docs/picture_files.py

site: docs  ## The same, with the page that runs memplan in a browser (needs npm)
	$(PYTHON) docs/browser/build.py site

test: $(ENVIRONMENT)  ## Run the whole test suite
	$(PYTHON) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

test-pure: export MEMPLAN_PURE_PYTHON = 1
test-pure: test  ## The same without the compiled core

sanitize: $(ENVIRONMENT)  ## Run the compiled core's tests under address and undefined-behaviour sanitizers
	$(PYTHON) benchmarks/sanitize.py $(PYTEST_FLAGS)

$(VERIFY_VENV)/.ready: pyproject.toml
	$(call new_environment,$(VERIFY_VENV))
	$(VERIFY_VENV)/bin/python -m pip install --quiet --no-compile $(TORCH)
	$(VERIFY_VENV)/bin/python -m pip install --quiet --no-compile transformers accelerate peft pytest hypothesis
	@touch $@

# torch's threads would wait for each other, spinning, in models that take less time than the waiting.
verify: export OMP_NUM_THREADS = 1
verify: $(VERIFY_VENV)/.ready  ## Follow torch's own code on fake tensors beside the estimates, in an environment with torch
	$(VERIFY_VENV)/bin/python -m pytest tests/verify tests/tracing tests/live $(PYTEST_FLAGS)

newest: $(VERIFY_VENV)/.ready  ## Say what moved in the newest torch, transformers and DeepSpeed
	DS_BUILD_OPS=0 $(VERIFY_VENV)/bin/python -m pip install --quiet --no-compile --upgrade deepspeed transformers
	PYTHONPATH=. $(VERIFY_VENV)/bin/python benchmarks/newest.py

schedulers: $(ENVIRONMENT)  ## Have the schedulers' own packages judge what --emit writes for them, in an environment with these
	$(SYSTEM_PYTHON) -m venv $(VENV)-schedulers
	$(VENV)-schedulers/bin/python -m pip install --quiet --no-compile kubernetes-validate pyyaml "ray[train]" skypilot
	$(PYTHON) benchmarks/schedulers.py write $(VENV)-schedulers/written.json
	$(VENV)-schedulers/bin/python benchmarks/schedulers.py judge $(VENV)-schedulers/written.json

pythons:  ## Run the whole test suite under every Python of PYTHONS that this machine has
	@found=; failed=0; for python in $(PYTHONS); do \
	  if "$$python" --version >/dev/null 2>&1; then \
	    found=yes; echo "== $$python"; \
	    $(MAKE) test SYSTEM_PYTHON="$$python" VENV="$(VENV)-$$python" || failed=1; \
	  else echo "== $$python is not here: not tested"; fi; \
	done; test -n "$$found" && exit $$failed

fuzz: $(ENVIRONMENT)  ## Look for inputs that break it, for FUZZ_SECONDS (600) in all
	FUZZ_SECONDS=$(FUZZ_SECONDS) $(PYTHON) -m pytest -m fuzz $(PYTEST_FLAGS)

golden: $(ENVIRONMENT)  ## Rewrite the expected output of tests/golden
	$(PYTHON) -m pytest tests/test_golden.py --update-golden $(PYTEST_FLAGS)

bench: $(ENVIRONMENT)  ## Measure the wheel, start-up, commands beside a minimal program, a sweep of 19,200 setups; fails when a bar is missed
	$(PYTHON) benchmarks/package.py
	$(PYTHON) benchmarks/startup.py
	$(PYTHON) benchmarks/commands.py
	$(PYTHON) benchmarks/sweep.py

mutate: $(ENVIRONMENT)  ## Change 100 lines of the estimation core at random, in memory: nine of ten have to fail a test
	$(PYTHON) benchmarks/mutate.py $(MUTATE_FLAGS)

bounds: $(ENVIRONMENT)  ## Name the tolerances of the accuracy tests that are more than five times what is reached
	$(PYTHON) benchmarks/bounds.py $(BOUNDS_FLAGS)

equal: $(ENVIRONMENT)  ## Compare every figure of a matrix of setups with those of another commit: BEFORE=main
	$(PYTHON) benchmarks/equal.py $(BEFORE) $(EQUAL_FLAGS)

accuracy: $(ENVIRONMENT)  ## Compare with every reference count and measurement at hand
	$(PYTHON) -m pytest tests/accuracy tests/measured --update-accuracy $(PYTEST_FLAGS)
	$(PYTHON) -m cogapp -r $(GENERATED)

build: $(ENVIRONMENT)  ## Build the wheel and the source distribution into dist/
	$(PYTHON) -m build

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) $(VENV)-* dist build memplan.egg-info memplan/memory/_replay*.so site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .mutants
