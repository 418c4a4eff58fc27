# Two commands do all the set-up on a fresh machine with Python 3.11+, git and make:
#   make demo    trains a small network on two ranks, and shows where the time went
#   make test    runs the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO   := build/demo
ACCEPTANCE := tests/benchmarks tests/conformance/test_torch_suite.py tests/docs tests/install tests/launchers tests/libraries

.PHONY: demo test acceptance docs conformance torture launchers versions check bench faults figures format clean

demo: $(READY)
	$(BIN)/paceline run -n 2 --record $(DEMO) examples/digits.py
	$(BIN)/paceline report $(DEMO)

# Three at a time also on two cores, because ranks often wait for each other; each file's tests stay together.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ACCEPTANCE:%=--ignore=%)

# What users meet: the commands of the pages, the examples, the benchmarks, PyTorch's own tests, and the libraries and
# launchers that they use. It starts some hundred programs that import torch, and so takes minutes to show what seldom breaks.
acceptance: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile $(ACCEPTANCE)

# Every page, with the reference from the docstrings, in build/docs; a warning is an error.
docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env docs build/docs
	@echo "open build/docs/index.html"

# PyTorch's own tests of its wrapper with paceline's in its place.
conformance: $(READY)
	$(BIN)/python tests/conformance/torch_suite/run.py --wrapper paceline

# What torch's wrapper and ours make of awkward models: docs/figures.json, and the tables of the pages.
torture: $(READY)
	$(BIN)/python tests/support/torture_table.py --write

# paceline with other versions of torch and Python: docs/versions.json and docs/versions.md. Each torch is a download of
# gigabytes. VERSIONS="2.10 2.15.0" and PYTHONS="python3.12 /a/path" try only these.
versions: $(READY)
	$(BIN)/python tests/versions/try_versions.py $(if $(VERSIONS),--versions $(VERSIONS)) $(if $(PYTHONS),--pythons $(PYTHONS))

# Two ranks under every launcher that can be had here: docs/figures.json, and the table of docs/launchers.md.
launchers: $(READY)
	$(BIN)/python tests/support/launcher_table.py --write

check:
	./check

bench: $(READY)
	$(BIN)/python benchmarks/data_parallel.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/ddp.py
	$(BIN)/python benchmarks/collectives.py

# The figures of the docs, measured anew on this machine, which should be idle; hosts and hooks need root.
figures: $(READY)
	for name in data_parallel ranks ddp memory collectives hosts hooks; do \
		$(BIN)/python benchmarks/$$name.py --figures docs/figures.json || exit 1; \
	done
	for options in "--busy 2" "--world 4" "--world 8"; do \
		$(BIN)/python benchmarks/ddp.py --parts steps --sides torch paceline $$options --figures docs/figures.json \
			|| exit 1; \
	done
	$(BIN)/python benchmarks/ddp.py --parts parameters --sides torch paceline floor --figures docs/figures.json
	$(BIN)/python benchmarks/ddp.py --optimizer adamw --figures docs/figures.json
	$(BIN)/python benchmarks/figures.py --write

# What each fault on one rank does to the others: docs/figures.json and docs/faults.md. Needs root, and two hours or more.
faults: $(READY)
	$(BIN)/python benchmarks/faults.py --figures docs/figures.json
	$(BIN)/python benchmarks/figures.py --write

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# Rebuilt only when what is to be installed changes, so a second run starts at once.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or newer (found: %s)" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
