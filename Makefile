# Two commands: `make serve` and `make test`. Everything they need they set up themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/local.yaml
MODEL ?= smollm2-135m
TEST_WORKERS ?= 2

.PHONY: serve test test-all lint bench gpu proto install model clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || { echo "making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (PyTorch, JAX and the rest; some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.9,<2.14"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[all]"
	@touch $@

model: install
	@$(BIN)/pdd pull $(MODEL)

# `make serve ONCE=1` ends by itself after one answer; its last line is a JSON object.
serve: model
	@$(BIN)/pdd serve $(CONFIG) $(if $(ONCE),--once)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/gen_proto.py --check

# Files of tests side by side; tests of the whole system one after another, for they start processes that want the cores themselves.
test: lint model
	$(BIN)/pytest -m "not slow" -n $(TEST_WORKERS) --dist loadfile --ignore=tests/system --ignore=tests/chaos
	$(BIN)/pytest -m "not slow" tests/system tests/chaos

test-all: lint model
	$(BIN)/pytest -n $(TEST_WORKERS) --dist loadfile --ignore=tests/system --ignore=tests/chaos
	$(BIN)/pytest tests/system tests/chaos

bench: model
	$(BIN)/pdd bench ttft $(CONFIG) --json docs/measurements/ttft.json --plot docs/measurements/ttft.png

# For a machine with an NVIDIA GPU, with what its Python has: installs nothing, fetches nothing, and says what it skips. JSON in $$OUT, if set.
gpu:
	@PYTHONPATH=.:bridge:kernels$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m benchmarks.gpu

proto: install
	$(BIN)/python tools/gen_proto.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
