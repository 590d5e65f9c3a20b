# make demo   trains plain and interleaved side by side on 8 CPU devices, compiles both for 4 GPUs, draws the timeline
# make test   the tests that need no GPU
# make lint   ruff and pyright
# Each sets up .venv first (requirements/install.sh), and again only when a requirement file changes.
# PYTHON=/path/to/python3.12 names the interpreter to start from.

VENV := .venv
INSTALL := requirements/install.sh $(VENV) requirements/run.txt requirements/compile.txt

export PYTHON

.PHONY: demo test lint venv clean

demo:
	@$(INSTALL)
	$(VENV)/bin/python -m dhelix.launch.demo

venv:
	@$(INSTALL) requirements/test.txt

test: venv
	$(VENV)/bin/pytest -n 2 -m "not gpu" $(PYTEST_ARGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --project $(VENV)/dhelix_path --pythonpath $(VENV)/bin/python

clean:
	rm -rf $(VENV) .venv-newest demo-output build *.egg-info .pytest_cache .ruff_cache .hypothesis
