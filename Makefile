# make run       set up, then the main job
# make test      set up, then the tests
# make test-all  the tests, the slow ones too, with random inputs in plenty and fresh seeds
# make check     formatting, lint, types, layers
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test test-all check format clean

# Four attentions on one task, in about five minutes on 2 cores; run it again to resume it.
run: $(READY)
	$(BIN)/subquad compare needle --attention full,combiner-fixed,composite-slice:slice_length=16,sbm:clusters=16 --out out/run

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow or not slow" --hypothesis-profile thorough

check: $(READY)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

# The stamp is written last: an interrupted installation is done again.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,dev,gpu]"
	touch $@

clean:
	rm -rf $(VENV) out build dist
