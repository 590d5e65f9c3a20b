# make demo   trains a plain and an interleaved step on 8 CPU devices, compiles both for 4 GPUs, draws the timeline
# make test   runs the tests that need no GPU and are not slow
# make test-slow   runs those that repeat at real size what shorter tests show
# make lint   runs ruff and pyright
# make docs   builds the site of docs/ in site/; fails on broken links and references, and on outdated result pages
# Each target first sets up .venv (requirements/install.sh), and again when a requirement file has changed.
# PYTHON=/path/to/python3.12 names the interpreter that makes .venv.

VENV := .venv
INSTALL := requirements/install.sh $(VENV) requirements/run.txt requirements/compile.txt

export PYTHON
unexport PYTHONDONTWRITEBYTECODE # many processes start, and each would compile all modules again

.PHONY: demo test test-slow lint docs venv clean

demo:
	@$(INSTALL)
	$(VENV)/bin/python -m dhelix.launch.shown.demo

venv:
	@$(INSTALL) requirements/test.txt

test: venv
	$(VENV)/bin/pytest -n 2 -m "not gpu and not slow" $(PYTEST_ARGS)

test-slow: venv
	$(VENV)/bin/pytest -n 2 -m "slow and not gpu" $(PYTEST_ARGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --project $(VENV)/dhelix_path --pythonpath $(VENV)/bin/python

docs:
	@$(INSTALL) requirements/test.txt requirements/docs.txt
	$(VENV)/bin/python -m dhelix.benchmarks.pages.write --check
	mkdir -p $(VENV)/docs_path/dhelix
	for part in __init__.py errors.py models passes profiles runtime; do ln -sfn $(CURDIR)/$$part $(VENV)/docs_path/dhelix/$$part; done
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

clean:
	rm -rf $(VENV) site .venv-newest demo-output build *.egg-info .pytest_cache .ruff_cache .hypothesis
