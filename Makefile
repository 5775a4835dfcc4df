# make demo   the pipeline of real processes, checked (ARGS="FILE --workers 8", ARGS=--break)
# make check  lint, types, and the tests that start no process: in a minute, while one writes
# make test   every test once but the long, the whole programs, the many combinations, the benchmarks, and what tries a model or a test; what depends on the driver, in the mode that is most like a GPU
# make test-models   the models that the order of the code's steps is held to, the mistakes planted in them and in the code, and all examples of what `make test` tries a part of
# make test-programs   whole programs, started as their users start them: the demo, the recipes, daemons with little left to them
# make test-modes   what depends on the driver in the software driver's other modes; and that one's own tests
# make gpu-wheels   WHEELS=dir: what `make test-gpu WHEELS=dir` installs on a machine with a GPU and without a network
# make test-gpu   OUT=dir: all that a machine with a GPU can show, in nine minutes; with WHEELS=dir without a network (ARGS="--minutes 4 --only gpu")
# make test-gpu-failed   OUT=dir: of that, the tests that failed in the last run into it
# make test-thorough   what `make test` leaves out: the long tests and the many combinations, and a minute of soak on each engine (SOAK_SECONDS=60)
# make test-keeper   the faults that a coordinator is in, over coordinators that have a keeper
# make test-all   every test on every driver, with the oldest and the newest libraries, long soaks, and the benchmarks; how long each pass took
# make test-flakes   make test FLAKES=20 times beside a busy core
# make soak   ten minutes of random work and random deaths (SOAK_MINUTES=10), then two each of chains and of graphs
# make soak-restarts   ten minutes of the same over a coordinator with a keeper that is killed every five seconds
# make soak-fleet   ten minutes over four hosts of eight processes that share nothing but a network (as root)
# make test-oldest, test-newest   the suite with the oldest and the newest libraries that pyproject.toml allows
# make test-lmcache   LMCache's server, client and unit tests over points, in build/lmcache
# make test-ray   tensors between actors of a real Ray over points, in build/ray
# make test-vllm   the engine for vLLM against its published interface, in build/vllm-test
# make test-deploy   what lies in deploy/, really started: units under systemd, containers by podman (as root)
# make test-matrix   the quick tests on each Python that is here, with the oldest and the newest libraries
# make benchmarks   each benchmark in its quick form: no row many times worse than it was
# make results   all benchmarks, and their tables in tests/benchmarks/RESULTS.md
# make sanitize   the compiled core's tests, with it built for the address and undefined-behaviour sanitizers
# make coverage   which lines of the product the tests run, in their processes too
# make mutants  planted mistakes in registry, dispatcher, effects, attachments and engines: those that the tests find
# make lint   ruff and mypy --strict
# make types  whether each public name has a type that every checker reads alike, in the package as installed
# make docs   the API reference and the pages, in site/, and what they look like in a browser
# make wheels   the wheels of a release in dist/wheels, each tried
# make dist   sdist and wheel in dist/, checked, installed outside of the checkout, tried (DIST_TESTS="tests" for all)
PYTHON ?= python3
# With it each of the thousand processes that the tests start compiles every source anew, and each worker every test.
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
# Three more than cores: a test mostly waits for another process, and leaves its core to the next.
WORKERS ?= $(shell echo $$(($$(nproc) + 3)))
# The workers of a pass that runs beside another one, or is short: each takes seconds to start.
WORKERS_BESIDE ?= $(shell echo $$(($$(nproc) + 1)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
SOAK_MINUTES ?= 10
# Of each soak that is a test.
SOAK_SECONDS ?= 60

install: $(VENV)/.installed

# The software driver and the compiled core are built with it.
$(VENV)/.installed: pyproject.toml hatch_build.py $(wildcard ipcsync/_engines/core_cython/* ipcsync/_softcuda/*.[ch] ipcsync/_softcuda/*/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[observer,fleet]' --group dev
	touch $@

demo: install
	$(BIN)/ipcsync demo $(ARGS)

check: lint
	IPCSYNC_DRIVER=host $(PYTEST) -m "not process and $(USUAL)" $(ARGS)

# What a change of the product can break, and is not long: a model imports nothing of it, a planted mistake tries a test, and
# what whole programs do, the others try by its parts.
USUAL := not thorough and not model and not planted and not program

marked = $(shell grep -rl --include='test_*.py' 'mark\.$(1)' tests)

# What is marked `alone` runs last, in processes of its own: elsewhere an earlier test may have left a stream that waits
# for the dead, and never ends. (5: no test was chosen, as by ARGS="-k …".)
tests = failed=0; $(PYTEST) $(1) -m "$(2) and not alone" $(ARGS) || failed=1; \
  { $(PYTEST) -n $(or $(3),$(WORKERS_BESIDE)) $(call marked,alone) -m "$(2) and alone" $(ARGS) || [ $$? = 5 ]; } && [ $$failed = 0 ]

# The tests that depend on the driver, and the rest. With WITH_THOROUGH=1 each at its full length: the rest is then all, and
# on each driver all run but the models and the planted mistakes, which no driver can change.
WITH_THOROUGH ?=
ifneq ($(WITH_THOROUGH),)
export IPCSYNC_TEST_LONG := 1
endif
# (Of the everyday tests few are alone, and short: a single process, which no worker has to be started for.)
rest_tests = $(call tests,tests,not benchmark$(if $(WITH_THOROUGH),, and not driver and $(USUAL)),$(if $(WITH_THOROUGH),,0))
driver_tests = $(if $(WITH_THOROUGH),$(call tests,tests,not benchmark and not model and not planted),$(call tests,$(call marked,driver),driver and $(USUAL),0))

# What a change of the product can break and is not long, each test once: what depends on the driver, with every operation
# sent through the stream's thread as on a GPU, and on a GPU if there is one. `test-modes` has the other modes.
# The two passes run side by side, since each mostly waits; what one of them says is shown once it has ended.
test: install
	@$(MAKE) --no-print-directory -j2 --output-sync=target everyday-rest everyday-driver

# The longer one has a worker more.
everyday-rest:
	@$(MAKE) --no-print-directory test-rest WORKERS=$$(($(WORKERS_BESIDE) + 1))

everyday-driver:
	@$(MAKE) --no-print-directory test-driver WORKERS=$(WORKERS_BESIDE)

test-driver:
	@$(MAKE) --no-print-directory test-on-gpu test-async

test-modes: test-sync test-complete test-softcuda

test-rest: install
	@export IPCSYNC_DRIVER=host; $(rest_tests)

test-async: install
	@export IPCSYNC_DRIVER=host IPCSYNC_HOST_ASYNC=1; $(driver_tests)

# With work done within the call where nothing is to be waited for.
test-sync: install
	@export IPCSYNC_DRIVER=host; $(driver_tests)

# The same, and a dead process's work complete.
test-complete: install
	@export IPCSYNC_DRIVER=host IPCSYNC_HOST_DEATH=complete; $(driver_tests)

# The software driver's own tests, in both modes: no change of the product can break them.
test-softcuda: install
	@export IPCSYNC_DRIVER=host IPCSYNC_TEST_SOFTCUDA=1; $(PYTEST) tests/softcuda $(ARGS) && IPCSYNC_HOST_ASYNC=1 $(PYTEST) tests/softcuda $(ARGS)

test-on-gpu: install
	@if IPCSYNC_DRIVER=cuda $(BIN)/python -c "import ipcsync; raise SystemExit(not ipcsync.is_available())" 2>/dev/null; then \
	  echo "on the GPU of this machine:"; export IPCSYNC_DRIVER=cuda; $(driver_tests); \
	else \
	  echo "not run on a GPU: there is none here"; \
	fi

# All that a machine with a GPU can show, in nine minutes; tests/gpu/run.py names the files in OUT. With WHEELS (from `make gpu-wheels` on a
# machine that has a network) it needs none: what is missing comes from there, and torch and cupy from PYTHON itself.
GPU_SITE := $(CURDIR)/build/gpu-site
test-gpu-failed:
	@$(MAKE) --no-print-directory test-gpu ARGS="--failed $(ARGS)"

test-gpu:
	@test -n "$(OUT)" || { echo "usage: make test-gpu OUT=DIRECTORY [WHEELS=DIRECTORY] [PYTHON=python3]"; exit 2; }
ifdef WHEELS
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target $(GPU_SITE) $(WHEELS)/*.whl
	cp -n $(GPU_SITE)/ipcsync/_engines/core*.so ipcsync/_engines/
	cp -n $(GPU_SITE)/ipcsync/_softcuda/*.so ipcsync/_softcuda/
	PYTHONPATH="$(GPU_SITE)" $(PYTHON) -m tests.gpu.run --out $(OUT) --lmcache $(WHEELS) $(ARGS)
else
	$(MAKE) -s install
	$(BIN)/python -m tests.gpu.run --out $(OUT) $(ARGS)
endif

# What PYTHON_THERE lacks, and ipcsync itself with its compiled core. WITH_LMCACHE=1: LMCache too, and its tests of events.
PYTHON_THERE ?= 3.12
PLATFORMS := $(foreach glibc,2_17 2_24 2_26 2_27 2_28,--platform manylinux_$(glibc)_$(shell uname -m)) --platform manylinux2014_$(shell uname -m) --platform linux_$(shell uname -m)
DOWNLOAD_THERE = $(BIN)/python -m pip download --quiet --only-binary=:all: --python-version $(PYTHON_THERE) \
  --implementation cp $(PLATFORMS) --dest $(WHEELS)
gpu-wheels: install $(if $(WITH_LMCACHE),build/lmcache/.installed)
	@test -n "$(WHEELS)" || { echo "usage: make gpu-wheels WHEELS=DIRECTORY [PYTHON_THERE=3.12] [WITH_LMCACHE=1]"; exit 2; }
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEELS) .
	$(DOWNLOAD_THERE) $(WHEELS)/ipcsync-*.whl pytest pytest-timeout pytest-xdist hypothesis jsonschema
ifdef WITH_LMCACHE
	$(DOWNLOAD_THERE) --no-deps lmcache==$(LMCACHE_VERSION) cachetools nvtx psutil pyyaml importlib_metadata zipp \
	  'opentelemetry-api<=1.40.0'
	cp $(LMCACHE)/source/tests/v1/platform/devices/cuda/test_event_ipc_ordering.py $(WHEELS)
	cp $(LMCACHE)/source/tests/v1/platform/devices/cuda/test_timeline_semaphore_event_ipc.py $(WHEELS)
endif

# Each pass runs whatever became of those before it; a line for each at the end says how long it took.
AT_LENGTH := WITH_THOROUGH=1 IPCSYNC_SOAK_SECONDS=$(SOAK_SECONDS)
test-all: install
	$(BIN)/python -m tests.kit.passes "$(MAKE) --no-print-directory" lint benchmarks test-oldest test-newest soak \
	  "test-rest $(AT_LENGTH)" "test-driver $(AT_LENGTH)" \
	  "test-complete $(AT_LENGTH)" test-softcuda "test-rest IPCSYNC_TEST_ZYGOTE=0" "test-sync IPCSYNC_TEST_ZYGOTE=0" test-keeper dist

# Then what `make test` tries a part of, in full: properties, short programs, steps to die at.
test-models: install
	@export IPCSYNC_DRIVER=host IPCSYNC_TEST_LONG=1; \
	{ $(call tests,$(call marked,model) $(call marked,planted),(model or planted) and not thorough); } && \
	$(PYTEST) $(shell grep -rlE --include='test_*.py' 'kit\.examples|frames.*MANY' tests/unit tests/faults) -m "$(USUAL)" $(ARGS)

test-programs: install
	@export IPCSYNC_DRIVER=host; $(call tests,$(call marked,program),program and not thorough)

# What of `test-all` is neither a driver's nor another library's.
test-thorough: install
	IPCSYNC_DRIVER=host IPCSYNC_SOAK_SECONDS=$(SOAK_SECONDS) $(PYTEST) tests -m thorough $(ARGS)

benchmarks: install
	IPCSYNC_DRIVER=host $(BIN)/python -m pytest tests/benchmarks $(ARGS)

# Every figure, into tests/benchmarks/RESULTS.md: on a machine that does nothing else. ARGS="--quick", "--only records".
results: install
	$(BIN)/python -m tests.benchmarks.results $(ARGS)

# The compiled core under the address and undefined-behaviour sanitizers; the usual files take their places again behind it.
# A report of any process fails it, also of one that a test expects to die. First a planted overflow must be found.
SANITIZED := -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
REPORTS := $(CURDIR)/build/sanitize
sanitize: install
	rm -rf $(REPORTS) && mkdir -p $(REPORTS)/usual && cp -p ipcsync/_engines/core*.so ipcsync/_softcuda/*.so $(REPORTS)/usual
	@trap 'cd $(REPORTS)/usual; mv core*.so $(CURDIR)/ipcsync/_engines; mv lib*.so $(CURDIR)/ipcsync/_softcuda' EXIT; \
	CFLAGS="$(SANITIZED)" $(BIN)/python -m pip install --quiet --no-deps --editable . || exit 1; \
	export IPCSYNC_DRIVER=host IPCSYNC_HOST_ASYNC=1 ASAN_OPTIONS=detect_leaks=0:log_path=$(REPORTS)/report UBSAN_OPTIONS=log_path=$(REPORTS)/report; \
	export LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)"; \
	! $(BIN)/python -m tests.faults.overflow && grep -q heap-buffer-overflow $(REPORTS)/report* && rm $(REPORTS)/report* && \
	$(PYTEST) $(call marked,core) -m "core and not thorough and not planted" $(ARGS); status=$$?; unset LD_PRELOAD; \
	cat $(REPORTS)/report* 2>/dev/null && exit 1; exit $$status

FLAKES ?= 20
test-flakes: install
	$(BIN)/python -m tests.kit.repeat $(FLAKES) $(MAKE) test

soak: install
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) --processes 64 --kill-rate 5 --seed 1
	$(BIN)/python -m tests.soak.chains --seconds 120 --lanes 4
	$(BIN)/python -m tests.soak.graphs --seconds 120 --lanes 2

# The rows of the fault table that a coordinator is in, over coordinators that have a keeper.
test-keeper: install
	IPCSYNC_TEST_KEEPER=1 IPCSYNC_DRIVER=host $(PYTEST) $(call marked,keeper) -m keeper $(ARGS)

# The soak over a coordinator with a keeper that is killed every five seconds.
soak-restarts: install
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES) --processes 64 --kill-rate 5 --seed 1 --coordinator-kills 5

# Four hosts of eight processes that share nothing but a network, and three servers in it, with random kills, stops and
# cuts (SOAK_MINUTES=10); as root.
soak-fleet: install
	$(BIN)/python -m tests.fleet.soak --minutes $(SOAK_MINUTES) --seed 1

OLDEST := .venv-oldest
test-oldest: BIN := $(OLDEST)/bin
test-oldest:
	$(PYTHON) -m venv $(OLDEST)
	sed -n '/^dependencies/,/^]/{/python_version/d;s/^ *"\([a-z-]*\)>=\([0-9.]*\).*/\1==\2/p}' pyproject.toml > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --upgrade pip
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[observer]' --group test --constraint $(OLDEST)/constraints.txt
	export IPCSYNC_DRIVER=host; $(call tests,tests,not benchmark and $(USUAL))

NEWEST := .venv-newest
test-newest: BIN := $(NEWEST)/bin
test-newest:
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --pre --editable '.[observer]' --group test
	export IPCSYNC_DRIVER=host; $(call tests,tests,not benchmark and $(USUAL))

# LMCache on torch for CPUs, without what it needs on a GPU only; then its server and client over points, and its own
# tests with stock events and with ours. About 1.3 GB, and the larger torch for CUDA where the index has no other.
LMCACHE := build/lmcache
LMCACHE_VERSION := 0.5.6
TORCH := torch==2.13.0
test-lmcache: $(LMCACHE)/.installed
	IPCSYNC_DRIVER=host $(LMCACHE)/bin/python -m pytest -n 0 tests/integrations/test_lmcache.py $(ARGS)
	nice $(LMCACHE)/bin/python -m tests.integrations.lmcache_suite $(LMCACHE)/source

# Its source distribution, which has the tests, is built by pip for its metadata: without its kernels.
$(LMCACHE)/.installed: pyproject.toml tests/integrations/lmcache.txt
	$(PYTHON) -m venv $(LMCACHE)
	$(LMCACHE)/bin/python -m pip install --quiet --upgrade pip
	$(LMCACHE)/bin/python -m pip install --quiet $(TORCH)
	$(LMCACHE)/bin/python -m pip install --quiet --requirement tests/integrations/lmcache.txt
	$(LMCACHE)/bin/python -m pip install --quiet --no-deps lmcache==$(LMCACHE_VERSION)
	NO_NATIVE_EXT=1 $(LMCACHE)/bin/python -m pip download --quiet --no-deps --no-build-isolation --no-binary lmcache \
	  --dest $(LMCACHE)/download lmcache==$(LMCACHE_VERSION)
	mkdir -p $(LMCACHE)/source
	tar -xzf $(LMCACHE)/download/lmcache-$(LMCACHE_VERSION).tar.gz -C $(LMCACHE)/source --strip-components 1
	mv $(LMCACHE)/source/lmcache $(LMCACHE)/source/lmcache-not-installed # the tests are to import what is installed
	$(LMCACHE)/bin/python -m pip install --quiet --editable . --group test
	touch $@

# A real Ray of one node, and tensors of the CPU between its actors.
RAY := build/ray
RAY_VERSION := 2.60.0
test-ray: $(RAY)/.installed
	IPCSYNC_DRIVER=host $(RAY)/bin/python -m pytest -n 0 tests/integrations/test_ray.py $(ARGS)

$(RAY)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --upgrade pip
	$(RAY)/bin/python -m pip install --quiet $(TORCH) ray==$(RAY_VERSION) numpy
	$(RAY)/bin/python -m pip install --quiet --editable . --group test
	touch $@

# The engine for vLLM against vLLM's own base classes and factories, from its source distribution: without its kernels.
VLLM := build/vllm-test
VLLM_VERSION := 0.33.0
test-vllm: $(VLLM)/.installed
	IPCSYNC_DRIVER=host PYTHONPATH=$(CURDIR)/$(VLLM)/source $(VLLM)/bin/python -m pytest -n 0 -W ignore tests/integrations/test_buckets.py \
	  tests/integrations/test_vllm.py $(ARGS)

$(VLLM)/.installed: pyproject.toml tests/integrations/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM)/bin/python -m pip install --quiet $(TORCH)
	$(VLLM)/bin/python -m pip install --quiet --requirement tests/integrations/vllm.txt
	VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) VLLM_TARGET_DEVICE=empty $(VLLM)/bin/python -m pip download --quiet --no-deps \
	  --no-build-isolation --no-binary vllm --dest $(VLLM)/download vllm==$(VLLM_VERSION)
	mkdir -p $(VLLM)/source
	tar -xzf $(VLLM)/download/vllm-$(VLLM_VERSION).tar.gz -C $(VLLM)/source --strip-components 1
	$(VLLM)/bin/python -m pip install --quiet --editable . --group test
	touch $@

# The units under a systemd that is init, and the containers of compose.yaml by podman; tests/deploy/prepare.sh says what
# this needs, root first of all.
test-deploy: install
	tests/deploy/prepare.sh $(CURDIR)/build/deploy $(BIN)/python
	IPCSYNC_DEPLOY=$(CURDIR)/build/deploy $(BIN)/python -m pytest -n 0 tests/deploy $(ARGS)

# Each Python that is here, with the oldest and the newest libraries; MATRIX_PYTHONS=path:path names others.
test-matrix: install
	nice $(BIN)/python -m tests.packaging.matrix build/matrix $(if $(ARGS),-- $(ARGS))

# What `make test` runs of the product, the tests of fleets, and the benchmarks in their quick form, by a Python that notes
# each line as it first runs (sys.monitoring, from 3.12 on): tests/kit/lines.py. A failed test does not end it, but fails it.
COVERAGE := .venv-coverage
coverage:
	@python="$$($(PYTHON) -m tests.packaging.pythons 3.12)" && $(MAKE) --no-print-directory VENV=$(COVERAGE) PYTHON="$$python" measured

measured: install
	$(BIN)/python -m pip install --quiet --group coverage
	$(BIN)/python -m tests.kit.covered begin
	@failed=0; $(MAKE) --no-print-directory test || failed=1; \
	export IPCSYNC_DRIVER=host; $(PYTEST) tests/fleet -m thorough $(ARGS) || failed=1; \
	$(BIN)/python -m pytest tests/benchmarks $(ARGS) || failed=1; \
	$(BIN)/python -m tests.kit.covered show && exit $$failed

# PARTS="registry effects" for some of them, ARGS="--sample 200" for some mutants of each.
mutants: install
	$(BIN)/python -m pip install --quiet --group mutants
	nice $(BIN)/python -m tests.mutation $(PARTS) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Installed, not editable: the package as its users' checkers see it.
TYPES := .venv-types
types:
	$(PYTHON) -m venv $(TYPES)
	$(TYPES)/bin/python -m pip install --quiet --upgrade pip
	$(TYPES)/bin/python -m pip install --quiet '.[observer]' --group types
	$(TYPES)/bin/python -m tests.kit.typed $(TYPES)/bin/python

docs: install
	$(BIN)/mkdocs build --strict
	IPCSYNC_DRIVER=host IPCSYNC_SITE=$(CURDIR)/site $(BIN)/python -m pytest -q -n 0 tests/docs/test_site.py $(ARGS)

DIST_TESTS ?= tests/unit tests/contract tests/events/test_shared_event.py
dist: install
	$(BIN)/python -m pip install --quiet --group dist
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python -m tests.packaging.installed dist -- $(DIST_TESTS)

# One for each kind of Python and machine that can be built for here.
wheels: install
	$(BIN)/python -m pip install --quiet --group dist
	rm -rf dist/wheels
	$(BIN)/python -m tests.packaging.wheels dist/wheels

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(COVERAGE) $(TYPES) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Every target but the files.
.PHONY: $(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))
