# Two commands do everything on a machine with only Python and make:
#   make demo    tunes two small models, trains one on real images, and says what to type next
#   make test    runs the tests
# Each first installs what it needs into .venv. A stamp file per set of packages marks what is installed.

PYTHON ?= python3
VENV   ?= .venv
RUNS   ?= runs/demo

# Options of examples/demo.py, such as DEMO='--budget 60'.
DEMO   ?=
PYTEST ?=

BIN := $(VENV)/bin
PY  := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --build-constraint constraints.txt
INPUTS := pyproject.toml constraints.txt

# Without bytecode each process of the tests compiles all of ours that it imports, and pytest rewrites every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo docs image wheel test test-slow test-sweeps test-faults test-all test-isa test-gpu check format install install-all reference relock clean clean-runs
.DELETE_ON_ERROR:

help:
	@echo "make demo      tune two small models and train one on real images; make clean-runs demo does so anew"
	@echo "make test      run the tests; PYTEST='tests/config -k plan' narrows them"
	@echo "make test-all  run the slow tests too"
	@echo "make test-isa  run the tests that depend on the CPU as smaller CPUs would"
	@echo "make test-gpu  run the tests that need a GPU"
	@echo "make test-sweeps  run what test-all leaves out: the families, layouts and long forms beside those that stand for them"
	@echo "make test-faults  run each fault (kills, full disks, flipped bits) as often as faults.md says"
	@echo "make check     format and lint checks, and types"
	@echo "make docs      build the site of docs/ into build/site; nothing in it needs a network"
	@echo "make wheel     build dist/penstock-*.whl, which pip installs anywhere"
	@echo "make image     build the Docker image and start it, where docker is"
	@echo "make format    fix what the formatter and the linter can fix"
	@echo "make clean     remove .venv, caches and the demo's runs"

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Python's venv module is missing or broken; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 3; }
	@$(PY) -m pip --disable-pip-version-check install --quiet --constraint constraints.txt --upgrade pip
	@touch $@

$(VENV)/.core: $(VENV)/.made $(INPUTS)
	@echo "installing Penstock and torch into $(VENV) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.demo: $(VENV)/.core
	@echo "installing transformers, whose BERT the demo tunes ..."
	@$(PIP) --editable '.[hf]'
	@touch $@

$(VENV)/.test: $(VENV)/.core
	@echo "installing what the tests need ..."
	@$(PIP) --editable '.[images,hf,text,languages,track,serve,export,test,docs]'
	@touch $@

$(VENV)/.check: $(VENV)/.core
	@echo "installing the checkers ..."
	@$(PIP) --editable '.[serve,check]'
	@touch $@

install: $(VENV)/.core
install-all: $(VENV)/.core $(VENV)/.test $(VENV)/.check

demo: $(VENV)/.demo
	@$(PY) examples/demo.py --output $(RUNS) $(DEMO)

# First the tests that may run beside each other, one more at a time than there are cores; then, one by one, those marked
# `alone`, for which no other module is read.
# Code 5 of pytest says that there were none: one of the two may have none.
define run_tests
@OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 8 --dist worksteal -m '$(1) and not alone' $(PYTEST); beside=$$?; \
  [ $$beside -le 1 ] || [ $$beside = 5 ] || exit $$beside; \
  $(PY) -m pytest -m '$(1) and alone' $(or $(PYTEST),$$(grep -rl --include='*.py' 'mark\.alone' tests)); alone=$$?; \
  case $$beside-$$alone in 0-0 | 0-5 | 5-0) ;; *) exit 1 ;; esac
endef

test: $(VENV)/.test
	$(call run_tests,not gpu and not slow and not faults and not sweep)

# Tests of what depends on the CPU, as on smaller ones: with AVX2 only, and with AVX-512 but no units for bf16. What this
# machine is itself, `make test` tries. What a script, a loop, a list or a copy is told is left out: it computes by the
# same operators. So are Triton's kernels, what plans without torch, and counts of parameters and FLOPs: they are the
# same everywhere.
ISA_TESTS = tests/kernels tests/precision/test_[almpt]*.py tests/precision/test_settings.py tests/products \
  tests/infer/test_encode.py tests/tasks/test_plans.py \
  tests/parallel/test_recompute.py tests/test_cpu.py $$(grep -lE '^(import|from) torch' tests/planner/*.py)
ISA_RUN = OMP_NUM_THREADS=1 $(PY) -m pytest -n logical --maxprocesses 8 --dist worksteal \
  -m 'not gpu and not slow and not faults and not sweep and not alone' $(ISA_TESTS) \
  -k 'not triton and not parameters_are and not flops' $(PYTEST)

test-isa: $(VENV)/.test
	@if $(PY) -c 'import torch; raise SystemExit(torch.backends.cpu.get_cpu_capability() != "AVX512")'; then set -e; \
	  ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	  TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor/avx2 $(ISA_RUN); \
	  ONEDNN_MAX_CPU_ISA=AVX512_CORE ATEN_CPU_CAPABILITY=avx512 MKL_ENABLE_INSTRUCTIONS=AVX512 \
	  TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor/avx512 $(ISA_RUN); \
	else echo "this CPU has no AVX-512, so there is no smaller one that it could stand in for"; fi

test-slow: $(VENV)/.test
	$(call run_tests,slow and not gpu and not faults and not sweep)

test-sweeps: $(VENV)/.test
	$(call run_tests,sweep and not gpu)
	$(PY) -m pytest -m 'not gpu' tools/op_claims.py

test-faults: $(VENV)/.test
	$(PY) -m pytest -m 'faults and not gpu' $(PYTEST)

test-all: $(VENV)/.test
	$(call run_tests,not gpu and not faults and not sweep)

test-gpu: $(VENV)/.test
	$(PY) -m pytest -m gpu $(PYTEST)

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "open build/site/index.html; for its search: $(PY) -m http.server -d build/site"

wheel: $(VENV)/.core
	@$(PY) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist --build-constraint constraints.txt .
	@echo "install it anywhere with: pip install $$(ls -t dist/penstock-*.whl | head -n 1)"

image:
	@if docker pull --quiet "$$(sed -n 's/^ARG BASE=//p' Dockerfile)" >/dev/null 2>&1; then \
	  docker build -t penstock . && docker run --rm penstock --version; \
	else echo "No docker that reaches a registry is here, so the image is not built; tests/test_packaging.py tries its commands."; fi

reference: $(VENV)/.core
	$(PY) tools/reference.py
	$(PY) tools/models.py
	$(PY) tools/op_lists.py
	$(PY) tools/ablation.py
	$(PY) tools/faults.py
	$(PY) tools/gains.py
	$(PY) tools/published.py

relock: install-all
	$(PY) tools/relock.py
	@touch $(VENV)/.core $(VENV)/.test $(VENV)/.check

clean-runs:
	rm -rf $(RUNS)

clean: clean-runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
