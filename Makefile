# Every target sets up what it needs by itself: a virtual environment in the checkout, made from
# exact versions, and looked at again only when the lock or pyproject.toml changes.

# The first of some names that can be run. What pyenv has installed and not selected is found, too:
# its commands for that only say so.
usable = $(shell for name in $(1); do \
	for each in $$name $${PYENV_ROOT:-$$HOME/.pyenv}/versions/*/bin/$$name; do \
	$$each -c '' 2>/dev/null && echo $$each && exit; done; done)

PYTHON ?= $(or $(shell command -v python3.11),$(shell command -v python3),python3.11)
VENV := .venv
# A Python that is asked for by name has an environment of its own.
ifneq ($(filter command environment,$(origin PYTHON)),)
override PYTHON := $(or $(call usable,$(PYTHON)),$(PYTHON))
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
endif
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCK := requirements/dev.txt

.DEFAULT_GOAL := help
.PHONY: help setup test test-newest lint house format demo bench profile features browser interop containers chaos soak docs lock clean

help: ## What there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(READY) ## Make the virtual environment (the other targets do it when needed)

# A set-up that was cut short leaves no stamp, and the next one goes on with it.
$(READY): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "OrbitMQ needs Python 3.11 or newer; name it with: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m tools.environment --venv $(VENV) --lock $(LOCK)
	@touch $@

# What needs more than Python packages, or more time than there is: interop, browser, containers and
# chaos run it.
APART := tests/interop tests/browser tests/containers tests/chaos tests/spark/test_moved_and_expired.py

test: $(READY) ## Everything that CI checks, on real files, processes and sockets
	@$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder --max-worker-restart=0 \
		$(addprefix --ignore=,$(APART)) -p tools.feature_plugin --features-to=build $(ARGS)

# Where a new interpreter shows first: bytes, sockets, threads, and handlers that are interrupted.
SENSITIVE := tests/wire tests/message tests/remoting \
	$(addprefix tests/client/consumer/test_,handlers.py middleware.py broker_requests.py resets.py)

test-newest: ## A fast part of the tests on the newest Python that is installed
	@python='$(call usable,python3.13 python3.12)'; \
	if [ -z "$$python" ]; then echo "Skipped: neither python3.13 nor python3.12 is here"; else \
	$(MAKE) --no-print-directory test PYTHON="$$python" ARGS="$(SENSITIVE) --features-to=build/newest"; fi

lint: $(READY) ## Format, lint, types, layers, limits of structure
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m tools.house --check

house: $(READY) ## How many modules and lines there are, and their limits
	@$(BIN)/python -m tools.house $(ARGS)

format: $(READY) ## Apply the formatter and the safe fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

demo: $(READY) ## See it work
	@$(BIN)/python -m examples.demo $(ARGS)

bench: $(READY) ## Measure against floors and peers (fetched once); QUICK=1 ends within 12 minutes
	@$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(ARGS)

profile: $(READY) ## Which functions take the time of the hot paths; flame graphs in build/profile
	@$(BIN)/python -m benchmarks.profiling $(ARGS)

features: $(READY) ## Which capabilities are proven by a passing test
	@$(BIN)/python -m tools.features $(ARGS)

browser: $(READY) ## The console in a real browser; needs Chromium
	@$(BIN)/python -m pytest tests/browser $(ARGS)

interop: $(READY) ## Against Apache RocketMQ itself; needs Java and Maven Central
	@$(BIN)/python -m pytest tests/interop -p tools.feature_plugin --features-to=build $(ARGS)

containers: $(READY) ## Build the images and run them; needs root, buildah and debootstrap
	@$(BIN)/python -m pytest tests/containers -s -rs -p tools.feature_plugin --features-to=build $(ARGS)

chaos: $(READY) ## Faults for half an hour to an hour, against the pass rules of docs/guarantees.md
	@$(BIN)/python -m tools.chaos $(ARGS)

soak: $(READY) ## Leaks: 1,000 reconnects and 100 restarts of a consumer
	@$(BIN)/python -m pytest tests/soak/client_soak.py -s $(ARGS)

docs: $(READY) ## Build the documentation site into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: $(READY) ## Resolve the dependencies anew
	@$(BIN)/python -m tools.lock

clean: ## Remove what the targets made
	@rm -rf $(VENV) .venv-* build dist .mypy_cache .ruff_cache .hypothesis .pytest_cache .import_linter_cache
