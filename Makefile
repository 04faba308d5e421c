# Needs python3.11 (or a newer python3) with venv, and make. Everything else is installed into .venv, once:
# a stamp file remembers the pyproject.toml and constraints it was built from.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3; do \
	"$$p" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
REQUIREMENTS := pyproject.toml constraints-dev.txt

.PHONY: demo test check bench clean

demo: $(VENV)/.stamp-demo
	$(BIN)/shardkeep demo

test: $(VENV)/.stamp-test
	scripts/check
	scripts/test

check: $(VENV)/.stamp-test
	scripts/check

bench: $(VENV)/.stamp-test
	$(BIN)/shardkeep bench

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "shardkeep needs Python 3.11 or newer, with venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-demo: $(REQUIREMENTS) | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-dev.txt -e '.[demo]'
	@touch $@

# The test set includes the demo's, so `make demo` after `make test` installs nothing.
$(VENV)/.stamp-test: $(REQUIREMENTS) | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints-dev.txt -e '.[demo,test]'
	@touch $(VENV)/.stamp-demo $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
