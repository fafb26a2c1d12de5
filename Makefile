# Everything runs in virtual environments of its own, made on first use by uv, which installs in
# seconds and keeps what it has fetched for the next environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TOOLS := .venv-uv
UV ?= $(TOOLS)/bin/uv
# uv does not read pip's settings.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
# Without compiled modules, each of the hundreds of processes that the tests start would compile what
# it imports anew, for some seconds.
unexport PYTHONDONTWRITEBYTECODE
RESULTS ?= sonic-bench
# Tests wait for servers as long as they compute, or longer: four processes keep two cores busy.
PROCESSES ?= 4
# How many arrays `make oracle` tries.
CASES ?= 20000
# For how long `make chaos` breaks things.
SECONDS ?= 30
# How many small calls `make soak` makes.
CALLS ?= 100000
# Where `make tagger` keeps the jets that it trains with.
JETS ?= sonic-training
# Which tests `make pytest` runs.
MARKED ?= not slow and not benchmark
PYTEST := python -m pytest --numprocesses=$(PROCESSES) --dist=worksteal

BENCHMARKS := layouts chunk startup wire distance shared_memory pool workflow failover balancer cluster facility

.PHONY: help demo quick test lint types unit pytest test-slow image matrix oracle chaos soak docs bench bench-quick bench-page \
	sample tagger clean

help:
	@echo "make demo     score the sample's jets on a local Triton and a dask cluster; plots and report"
	@echo "make quick    style, types and the tests that need no server: for every change"
	@echo "make test     style, types and the test suite, against the real Triton"
	@echo "make test-slow  the tests that take minutes: the demo, the gallery, real proxies, containers"
	@echo "              and batch systems, pages and notebooks, a thousand simulated clients"
	@echo "make image    the tests of dask-awkward and more, with the versions of a facility's image,"
	@echo "              and a few with those that public frameworks pin"
	@echo "make matrix   the lowest and the highest versions of everything, on each Python at hand"
	@echo "make oracle   layouts and calls against slow references, on 20,000 arrays; or CASES=100000"
	@echo "make chaos    break servers, proxies and workers while they score, and check all rows;"
	@echo "              SECONDS=600 SEED=7 for longer, and for the faults of a run that failed"
	@echo "make soak     make many calls and connections, after which a process holds no more;"
	@echo "              CALLS=5000 for less"
	@echo "make docs     build the documentation as a site, in docs/_build"
	@echo "make bench    measure, against peers and limits; tables, and JSON in $(RESULTS)/"
	@echo "make bench-quick  the same with little: shows that all of it runs, not how fast"
	@echo "make bench-page  write the documentation's page of benchmarks from $(RESULTS)/"
	@echo "make sample   make the committed sample again (Pythia)"
	@echo "make tagger   train the committed networks again (torch)"
	@echo "make clean    remove the virtual environments and what the demo made"

$(TOOLS)/bin/uv:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check uv

$(TOOLS)/bin/nox: | $(UV)
	$(UV) pip install --quiet --python $(TOOLS)/bin/python "nox[uv]>=2025.10"

$(BIN)/python: | $(UV)
	$(UV) venv --quiet --python $(PYTHON) $(@D:/bin=)

# One stamp for each set of requirements, made anew when they change: those of users of the demo, or
# a group of developers'.
$(VENV)/.demo-installed: WHAT := --editable ".[demo]"
$(VENV)/.%-installed: WHAT = --editable . --group $*
$(VENV)/.%-installed: pyproject.toml | $(BIN)/python
	$(UV) pip install --quiet --python $(BIN)/python $(WHAT)
	@touch $@

demo: $(VENV)/.demo-installed
	$(BIN)/sonic-coffea demo

quick: lint types unit

test: lint types pytest

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-installed
	$(BIN)/mypy

# Threads that wait for others spin, in each of many processes that share the cores.
unit pytest test-slow: export OMP_NUM_THREADS ?= 1

unit: $(VENV)/.dev-installed
	$(BIN)/$(PYTEST) -m "not server and not slow and not benchmark"

pytest: $(VENV)/.dev-installed
	$(BIN)/sonic-coffea server install
	$(BIN)/$(PYTEST) -m "$(MARKED)"

test-slow: $(VENV)/.dev-installed
	$(BIN)/sonic-coffea server install
	$(BIN)/$(PYTEST) -m slow

# dask-awkward needs an older dask, and so an environment of its own: that of an image of a facility.
image: $(TOOLS)/bin/nox
	PROCESSES=$(PROCESSES) $(TOOLS)/bin/nox --session frameworks \
		image-$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

matrix: $(TOOLS)/bin/nox
	PROCESSES=$(PROCESSES) $(TOOLS)/bin/nox

oracle: $(VENV)/.dev-installed
	SONIC_ORACLE_CASES=$(CASES) $(BIN)/python -m pytest tests/layouts/test_oracle.py \
		tests/model/test_call_oracle.py

chaos: $(VENV)/.dev-installed
	$(BIN)/sonic-coffea server install
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

soak: $(VENV)/.dev-installed
	$(BIN)/sonic-coffea server install
	$(BIN)/python -m tests.chaos.soak --calls $(CALLS)

docs: $(VENV)/.dev-installed
	$(BIN)/python -m sphinx -q -E -W --keep-going docs docs/_build/html
	@echo "the documentation is in docs/_build/html/index.html"

bench: $(VENV)/.dev-installed
	$(BIN)/sonic-coffea server install
	for name in $(BENCHMARKS); do \
		$(BIN)/python benchmarks/$$name.py --json $(RESULTS)/$$name.json || exit 1; \
	done

bench-quick: $(VENV)/.dev-installed
	$(BIN)/sonic-coffea server install
	$(BIN)/$(PYTEST) -m benchmark

bench-page: $(VENV)/.dev-installed
	$(BIN)/python benchmarks/document.py $(RESULTS)

sample: $(VENV)/.simulation-installed
	$(BIN)/python examples/simulation/generate.py src/sonic_coffea/demo/data

tagger: $(VENV)/.simulation-installed $(VENV)/.training-installed
	$(BIN)/python examples/training/train_toptagger.py --data $(JETS)

clean:
	rm -rf $(VENV) .nox $(TOOLS) sonic-demo $(RESULTS) docs/_build
