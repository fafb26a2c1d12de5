# Everything runs in a virtual environment of its own, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# dask-awkward needs an older dask, and so an environment of its own.
LAZY := .venv-lazy
RESULTS ?= sonic-bench

BENCHMARKS := layouts chunk startup wire shared_memory pool gpu workflow failover cluster facility

.PHONY: help demo test lint types pytest test-lazy docs bench bench-quick bench-page sample tagger clean

help:
	@echo "make demo     score the sample's jets on a local Triton and a dask cluster; plots and report"
	@echo "make test     style, types and the test suite, against the real Triton"
	@echo "make test-lazy  the tests of dask-awkward support, in an environment of their own"
	@echo "make docs     build the documentation as a site, in docs/_build"
	@echo "make bench    measure, against peers and limits; tables, JSON and figures in $(RESULTS)/"
	@echo "make bench-quick  the same with little: shows that all of it runs, not how fast"
	@echo "make bench-page  write the documentation's page of benchmarks from $(RESULTS)/"
	@echo "make sample   make the committed sample again (Pythia)"
	@echo "make tagger   train the committed networks again (torch)"
	@echo "make clean    remove the virtual environment and what the demo made"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp for each set of extras, made anew when the requirements change.
$(VENV)/.%-installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@

demo: $(VENV)/.demo-installed
	$(BIN)/sonic-coffea demo

test: lint types pytest

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-installed
	$(BIN)/mypy

pytest: $(VENV)/.test-installed
	$(BIN)/sonic-coffea server install
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-lazy: $(LAZY)/.installed
	$(LAZY)/bin/sonic-coffea server install
	$(LAZY)/bin/python -m pytest tests/lazy \
		"tests/docs/test_documentation.py::test_page_runs[docs/how-to/use-dask-awkward.md]"

$(LAZY)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LAZY)
	$(LAZY)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[lazy,test]"
	@touch $@

docs: $(VENV)/.docs-installed
	$(BIN)/python -m sphinx -q -W --keep-going docs docs/_build
	@echo "the documentation is in docs/_build/contents.html"

bench bench-quick: $(VENV)/.bench-installed
	$(BIN)/sonic-coffea server install
	for name in $(BENCHMARKS); do \
		$(BIN)/python benchmarks/$$name.py $(if $(findstring quick,$@),--quick) \
			--json $(RESULTS)/$$name.json --figure $(RESULTS)/$$name.png || exit 1; \
	done

bench-page: $(VENV)/.bench-installed
	$(BIN)/python benchmarks/document.py $(RESULTS)

sample: $(VENV)/.simulation-installed
	$(BIN)/python examples/simulation/generate.py --sample src/sonic_coffea/demo/data

tagger: $(VENV)/.simulation,training-installed
	$(BIN)/python examples/training/train_toptagger.py

clean:
	rm -rf $(VENV) $(LAZY) sonic-demo $(RESULTS) docs/_build
