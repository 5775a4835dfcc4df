# make demo   the pipeline of real processes, checked (ARGS="FILE --workers 8", ARGS=--break)
# make test   the whole suite, on every driver that is here
# make soak   ten minutes of random work and random deaths (SOAK_MINUTES=10)
# make test-oldest   the suite with the oldest version of each library that pyproject.toml allows
# make lint   ruff and mypy --strict
# make docs   the API reference and the pages, in site/
# make wheels   the wheels of a release in dist/wheels: with the compiled core and without, each tried
# make dist   sdist and wheel in dist/, checked, installed outside of the checkout, tried (DIST_TESTS="tests" for all)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One for each core, and four where there are fewer: the tests mostly wait for other processes.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? 4 : n)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
SOAK_MINUTES ?= 10

install: $(VENV)/.installed

# The compiled core is built with it, where a C compiler is.
$(VENV)/.installed: pyproject.toml hatch_build.py ipcsync/_engines/core.pyx
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[observer]' --group dev
	touch $@

demo: install
	$(BIN)/ipcsync demo $(ARGS)

test: test-host test-host-async test-cuda

test-host: install
	IPCSYNC_DRIVER=host $(PYTEST) $(ARGS)

# What depends on the driver; what does not ran in the first pass.
INDEPENDENT := tests/multiprocess/test_pytest_plugin_runs.py tests/multiprocess/test_observer.py \
  tests/multiprocess/test_observer_page.py tests/multiprocess/test_top.py tests/multiprocess/test_notify.py \
  tests/multiprocess/test_watch.py tests/multiprocess/test_doctor.py tests/faults/test_hostile_input.py \
  tests/faults/test_files.py tests/faults/test_feed.py tests/faults/test_limits.py tests/faults/test_board_model.py \
  tests/faults/test_board_order.py tests/soak/test_history_checker.py
# The soak runs once on each driver: on cuda in the asynchronous pass, the nearer one to a GPU.
SOAK_TEST := tests/soak/test_soak.py
DRIVER_TESTS := tests/contract tests/multiprocess tests/faults tests/soak tests/unit/test_native_*.py \
  $(addprefix --ignore=,$(INDEPENDENT))

# With every operation sent through the stream's thread.
test-host-async: install
	IPCSYNC_DRIVER=host IPCSYNC_HOST_ASYNC=1 $(PYTEST) $(DRIVER_TESTS) --ignore=$(SOAK_TEST) $(ARGS)

# On the GPU if there is one, and on the software libcuda of tests/simcuda.
test-cuda: test-gpu test-simcuda

SIMCUDA := build/simcuda
ON_SIMCUDA := LD_LIBRARY_PATH="$(CURDIR)/$(SIMCUDA)$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}" IPCSYNC_DRIVER=cuda
test-simcuda: install
	@if ! command -v $(CC) >/dev/null; then \
	  echo "cuda half: not run on the software libcuda (tests/simcuda): there is no C compiler ($(CC)) to build it with"; \
	else \
	  set -e; $(MAKE) -s -C tests/simcuda OUT="$(CURDIR)/$(SIMCUDA)"; export $(ON_SIMCUDA); \
	  SIMCUDA_SELFTEST=1 $(PYTEST) tests/simcuda $(ARGS); \
	  SIMCUDA_SELFTEST=1 SIMCUDA_ASYNC=1 $(PYTEST) tests/simcuda $(ARGS); \
	  $(PYTEST) $(DRIVER_TESTS) --ignore=$(SOAK_TEST) $(ARGS); \
	  SIMCUDA_ASYNC=1 SIMCUDA_DEATH=pending $(PYTEST) $(DRIVER_TESTS) $(ARGS); \
	fi

test-gpu: install
	@if IPCSYNC_DRIVER=cuda $(BIN)/python -c "import ipcsync; raise SystemExit(not ipcsync.is_available())" 2>/dev/null; then \
	  echo "cuda half: on the GPU of this machine" && IPCSYNC_DRIVER=cuda $(PYTEST) $(DRIVER_TESTS) tests/gpu $(ARGS); \
	else \
	  echo "cuda half: not run on a GPU: there is none here"; \
	fi

soak: install
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) --processes 64 --kill-rate 5 --seed 1

OLDEST := .venv-oldest
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	sed -n '/^dependencies/,/^]/s/^ *"\([a-z-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[observer]' --group test --constraint $(OLDEST)/constraints.txt
	IPCSYNC_DRIVER=host $(OLDEST)/bin/python -m pytest -n $(WORKERS) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: install
	$(BIN)/mkdocs build --strict

DIST_TESTS ?= tests/unit tests/contract tests/multiprocess/test_shared_event.py
dist: install
	$(BIN)/python -m pip install --quiet --group dist
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m tests.packaging.installed dist -- $(DIST_TESTS)

# One with the compiled core for each kind of Python and machine that can be built for here, and one without it.
wheels: install
	$(BIN)/python -m pip install --quiet --group dist
	rm -rf dist/wheels
	$(BIN)/python -m tests.packaging.wheels dist/wheels

clean:
	rm -rf $(VENV) $(OLDEST) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

.PHONY: install demo test test-host test-host-async test-cuda test-simcuda test-gpu test-oldest soak lint docs dist wheels clean
