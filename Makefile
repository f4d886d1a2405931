# Everything happens in .venv/ of this checkout. `make demo` and `make test` need git, make and a Python >= 3.12.
#
#   make demo        train a small mixture-of-experts model on this machine, in minutes
#   make test        run the tests (GPU tests too, where there is a GPU); ARGS="tests/moe -x" passes words to pytest
#   make test-fast   the tests that start no process group and take seconds
#   make lint        format check, lint, types, spelling
#   make format      mend what `make lint` can mend by itself
#   make env         only make or update the environment; PYTHON=... names the Python to make it with
#   make clean       remove build products and caches;  make distclean: the environment too

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
ARGS   ?=

.DELETE_ON_ERROR:
.PHONY: demo test test-fast lint format env clean distclean

# Two processes with the experts spread over both, on two GPUs or on the CPU; one process where there is one GPU.
demo: env
	@gpus=$$($(PY) -c 'from maniple.launch.torchrun import visible_gpus; print(visible_gpus())') || exit 1; \
	if [ "$$gpus" = 1 ]; then set -- --nproc 1 --set parallel.expert_parallel_size=1; else set -- --nproc 2; fi; \
	$(PY) -m maniple train configs/demo.yaml "$$@" $(ARGS)

# Two test processes, one file to a process: a file's shared fixtures (a built wheel, a trained run) are made once. Files run
# as they come: by number of tests, as xdist would order them, the longest ones would be last and leave a core idle.
test: env
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: env
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile -m "not slow and not distributed and not gpu" $(ARGS)

lint: env
	@$(PY) -m ruff format --check --quiet --output-format concise . || { echo "run: make format"; exit 1; }
	@$(PY) -m ruff check --quiet --output-format concise .
	@$(PY) -m mypy
	@$(PY) -m codespell_lib
	@echo "lint: clean"

format: env
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

# The stamp is written last, so that an interrupted or failed installation is taken up again by the next make.
env: $(STAMP)

$(STAMP): pyproject.toml requirements/constraints.txt
	@rm -f $@
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	    python=$$(PYTHON="$(PYTHON)" sh scripts/find-python.sh) || exit 1; \
	    echo "env: making $(VENV) with $$python"; \
	    rm -rf $(VENV); \
	    "$$python" -m venv $(VENV) || exit 1; \
	fi
	@echo "env: installing what requirements/constraints.txt pins: several GB the first time, 3 to 6 minutes without a word"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt -e '.[dev]'
	@$(PY) -c 'import torch, maniple; print("env: ready: maniple", maniple.__version__, "torch", torch.__version__)'
	@touch $@

clean:
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV)
