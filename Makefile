# make quickstart   generate data, train a small model on two CPU ranks, show its losses: under 3 minutes
# make test         the tests of what a change can break cheaply, parity included
# make test-all     all tests: programs, signals, Ray, the commands of the docs, benchmarks too
# make durations    all tests, and how long each file takes: tests/DURATIONS.md
# make test-gpu     the tests of what runs on a CUDA GPU alone; skipped without one
# make test-chaos   kill -9 a rank of a run fifty times: within 30 minutes
# make fuzz         damage what readers read, SECONDS of it (600)
# make cluster      two hosts as network namespaces, slurm's own daemons, Ray: minutes, as root (what is missing is skipped)
# make test-newest  parity, layers, attention, tiles and what is relied on, beside the newest transformers that was tried
# make verl-versions  the datasets in verl 0.7.1 and 0.8.0, each in a .venv-verl-VERSION of its own
# make verl-nightly   what is relied on in verl, and its runs, with the newest wheel above verl's bound, or VERL=file.whl
# make test-trl     losses and tokens of preferences beside TRL's trainers, in a .venv-trl of its own
# make test-triton  the kernels of flash-linear-attention and Liger in Triton's interpreter on the CPU, in a .venv-triton of its own
# make lint         ruff, format check, type check of the public API, line budgets, durations of tests, shellcheck, sentences, the site
# make docs         the manual as a site on this machine, at http://127.0.0.1:8000, made again at every change
# make site         the manual as a site, in build/site
# make bench        the benchmarks of benchmarks/README.md
# make bench-quick  every benchmark on its smallest shape, also benchmarks/gpu on the CPU: whether it runs
# make lock         write constraints.txt again: the newest versions that pyproject.toml allows
# make clean        remove caches, builds and quickstart_run/; make distclean removes .venv too
#
# Each target creates .venv and installs what it needs, once; pyproject.toml's changes install again.
# Another Python: make test PYTHON=python3.11
# Versions are those of constraints.txt; LOCKED= takes the newest that pyproject.toml allows, and so do TORCH= and TRANSFORMERS=
# Another torch: make test TORCH=2.11.0, in a .venv-torch-2.11.0 of its own; so do lint, test-gpu and the others
# Another transformers, past verl's bound: make test TRANSFORMERS=5.24.0, in a .venv-transformers-5.24.0; TORCH= may be given too

PYTHON ?= python3
PYTEST_ARGS ?=

SHELL := /bin/bash
VENV := .venv$(TORCH:%=-torch-%)$(TRANSFORMERS:%=-transformers-%)
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)

# With the newest pip: releases before 23.1, which Python 3.10 and 3.11 bring, may search for hours for versions that fit.
NEW_VENV := -m venv --upgrade-deps

.PHONY: help quickstart test test-all durations test-gpu test-newest test-chaos fuzz cluster verl-versions verl-nightly test-trl test-triton lint docs site bench bench-quick lock clean distclean

help:
	@sed -n '/^# make/s/^# //p' Makefile

quickstart: $(VENV)/.installed-test
	recipes/quickstart/run.sh quickstart_run

# One thread a process: the tests and the ranks that they start share the cores. OMP_NUM_THREADS=4 make test passes too.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not cluster and not slow' $(PYTEST_ARGS)

test-all: export OMP_NUM_THREADS ?= 1
test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

durations: export OMP_NUM_THREADS ?= 1
durations: $(VENV)/.installed-test
	report=$$(mktemp) && { $(BIN)/python -m pytest -n 2 --dist loadfile --junit-xml=$$report $(PYTEST_ARGS); \
		$(BIN)/python -m tests.lib.durations $$report; code=$$?; rm $$report; exit $$code; }

NEWEST := 5.24.0
OF_NEWEST := upstream_contract parity layers model_support rope attention attention_backends tiles towers fla hybrid_training

test-newest:
	$(MAKE) test TRANSFORMERS=$(NEWEST) PYTEST_ARGS="-m 'not cluster' $(wildcard $(OF_NEWEST:%=tests/*/test_%.py)) $(PYTEST_ARGS)"

test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

test-chaos: export OMP_NUM_THREADS ?= 1
test-chaos: $(VENV)/.installed-test
	$(BIN)/python -m tests.chaos.kills --kills 50 --seconds 1800

fuzz: export OMP_NUM_THREADS ?= 1
fuzz: SECONDS ?= 600
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.lib.fuzz_readers --seconds $(SECONDS)

cluster: export OMP_NUM_THREADS ?= 1
cluster: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS)

VERLS := 0.7.1 0.8.0

verl-versions: export HF_HUB_OFFLINE ?= 1
verl-versions: $(VERLS:%=.venv-verl-%/.installed)
	set -e; for version in $(VERLS); do \
		.venv-verl-$$version/bin/python -m pytest --noconftest --disable-warnings tests/peers/test_drop_in.py $(PYTEST_ARGS); done

TRIED_VERL := 0.9.1
OF_VERL := upstream_contract plugin stock_verl verl_masks verl_offload drop_in parity verl_runs

verl-nightly: export OMP_NUM_THREADS ?= 1
verl-nightly: $(VENV)/bin/python
	@set -e; wheel='$(VERL)'; if [ -z "$$wheel" ]; then \
		versions=$$($(BIN)/python -m pip index versions --pre verl 2>/dev/null) || { \
			echo "make verl-nightly needs a package index with verl, or VERL=file.whl" >&2; exit 1; }; \
		newest=$$(sed -n '1s/.*(\(.*\))/\1/p' <<<"$$versions"); wheel=verl==$$newest; \
		[ "$$(sort -V <<<"$(TRIED_VERL)"$$'\n'"$$newest" | tail -1)" != $(TRIED_VERL) ] || { \
			echo "No wheel of verl is newer than $(TRIED_VERL), with which all tests run"; exit 0; }; \
	fi; \
	$(BIN)/python $(NEW_VENV) .venv-verl-nightly; new=.venv-verl-nightly/bin/python; \
	$$new -m pip install --quiet $(WITH_TORCH) -e '.[test]'; $$new -m pip install --quiet "$$wheel"; \
	$$new -m pytest -n 2 --dist loadfile $(wildcard $(OF_VERL:%=tests/*/test_%.py)) $(PYTEST_ARGS)

test-trl: export HF_HUB_OFFLINE ?= 1
test-trl: .venv-trl/.installed
	.venv-trl/bin/python -m pytest --noconftest --disable-warnings tests/losses/test_preference_trl.py $(PYTEST_ARGS)

test-triton: export TRITON_INTERPRET := 1
test-triton: export OMP_NUM_THREADS ?= 1
test-triton: .venv-triton/.installed
	.venv-triton/bin/python -m pytest tests/layers/test_triton_kernels.py $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lib.line_budgets
	$(BIN)/python -m tests.lib.public_names
	$(BIN)/python -m tests.lib.durations
	$(BIN)/shellcheck launch/*.sh launch/*.sbatch
	$(BIN)/python docs/prose.py
	$(BIN)/mkdocs build --strict --quiet

# Notices about other site generators, in every build.
lint docs site: export NO_MKDOCS_2_WARNING := 1
lint docs site: export DISABLE_MKDOCS_2_WARNING := true

site: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs serve

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks

bench-quick: export OMP_NUM_THREADS ?= 1
bench-quick: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks --quick

# uv writes versions for every Python at once, and keeps those of the file that still fit; --upgrade raises them.
LOCK_PYTHON := 3.10
lock: $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --upgrade --python-version $(LOCK_PYTHON) --no-annotate --no-header \
		--extra dev --constraints <(echo 'torch<2.14') pyproject.toml -o constraints.txt
	sed -i '1i # The versions that are installed together in `make` and CI, for Python 3.10 to 3.12: `make lock` writes them.' constraints.txt

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis quickstart_run
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-trl .venv-triton .venv-verl-* .venv-torch-* .venv-transformers-*

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || { \
		echo "PYTHON must be a Python 3.10 to 3.12; got '$(PYTHON)' ($$($(PYTHON) --version 2>&1))." \
		     "Try: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) $(NEW_VENV) $(VENV)

# What these versions of verl were released beside: they need numpy 1 and a transformers with Qwen2-VL's older names,
# which this package's own requirements exclude (--no-deps), and its datasets do not need.
.venv-verl-%/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing verl $* into .venv-verl-$*: once, a few minutes"
	$(BIN)/python $(NEW_VENV) .venv-verl-$*
	.venv-verl-$*/bin/python -m pip install --quiet 'verl==$*' 'torch>=2.11,<2.14' 'transformers>=4.56,<5' \
		'datasets>=4,<5' 'pyarrow>=19,<23' pytest rich orjson uvicorn fastapi cachetools
	.venv-verl-$*/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# The tests call methods of trainers that are not public, so that another version of TRL may need other tests.
.venv-trl/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing TRL into .venv-trl: once, a few minutes"
	$(BIN)/python $(NEW_VENV) .venv-trl
	.venv-trl/bin/python -m pip install --quiet 'trl==1.16.0' 'torch>=2.11,<2.14' 'transformers>=5.5.3,<5.11' \
		pytest omegaconf typing-extensions xxhash orjson
	.venv-trl/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# A build of torch without CUDA brings no Triton. The tests change its interpreter, so that another version may need others.
.venv-triton/.installed: pyproject.toml | $(VENV)/bin/python
	@echo "Installing verl-ext[test,gpu,hybrid] into .venv-triton: once, a few minutes"
	$(BIN)/python $(NEW_VENV) .venv-triton
	.venv-triton/bin/python -m pip install --quiet $(WITH_TORCH) 'triton==3.7.1' -e '.[test,gpu,hybrid]'
	@touch $@

# torch 2.14 ran once and not in CI: its builds are for CUDA alone, of several GB, so that it comes only where it is named.
WITH_TORCH = 'torch$(if $(TORCH),==$(TORCH),<2.14)'

# verl caps transformers; a second install, of transformers alone, brings its own requirements and tells of the cap.
NEWER = $(TRANSFORMERS:%=$(BIN)/python -m pip install --quiet 'transformers==%')

LOCKED := -c constraints.txt
LOCK = $(if $(TORCH)$(TRANSFORMERS),,$(LOCKED))

# The stamps say which extras are in .venv; an install that was cut short leaves none.
$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing verl-ext[test] into $(VENV): once, a few minutes"
	$(BIN)/python -m pip install --quiet $(LOCK) $(WITH_TORCH) -e '.[test]'
	$(NEWER)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing verl-ext[dev] into $(VENV): once, a few minutes"
	$(BIN)/python -m pip install --quiet $(LOCK) $(WITH_TORCH) -e '.[dev]'
	$(NEWER)
	@touch $@ $(VENV)/.installed-test
