# Two commands: `make demo` sets everything up and runs the main job, `make test` sets everything up and passes the tests.
PYTHON ?= python3
VENV ?= .venv
VENV_VERL ?= .venv-verl
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# The installs compile nothing: what is imported is compiled once and kept, also where the shell says otherwise.
export PYTHONDONTWRITEBYTECODE =
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test thorough nightly environments check lint types scripts unit numerical verl openrlhf openrlhf-run wheel dist docs docs-reference pictures sheet browser bench bench-app bench-detect bench-forecast faults mutants clean

demo: $(VENV)/.demo
	$(BIN)/rlwatch demo $(ARGS)

# Environments are made and the code is checked at once; the tests come one part after the other, each with two cores:
# browsers, ranks and trainings that have to share them with another part run into deadlines. Beside verl's two workers,
# which wait for Ray, there is always one more process.
test:
	$(MAKE) -j3 --output-sync=target environments browser check $(VENV)/.compiled $(VENV_VERL)/.compiled
	$(MAKE) unit
	$(MAKE) -j2 --output-sync=target verl numerical openrlhf wheel SETS=1

environments: $(VENV)/.dev $(VENV_VERL)/.openrlhf

check: lint types scripts

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python docs/prose.py

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/mypy app

# The typed scripts of the dashboard, by TypeScript where there is npm: they are plain ES modules with JSDoc types, so
# nothing that installs or tests rlwatch needs it.
TYPED := $(wildcard app/*.js) app/globals.d.ts
TSC := build/typescript/node_modules/.bin/tsc
scripts:
	@command -v npm >/dev/null && { test -x $(TSC) || npm install --silent --prefix build/typescript typescript@7.0.2 >/dev/null 2>&1; } \
	|| { echo "the types of $(TYPED) are not checked: no npm, or no registry"; exit 0; }; \
	test ! -x $(TSC) || $(TSC) --noEmit --allowJs --checkJs --strict --target es2023 --module esnext \
	  --moduleResolution bundler --lib es2023,dom,dom.iterable $(TYPED)

# Imports every test once in a new environment: what workers would each compile, at the same time, is compiled and kept.
$(VENV)/.compiled: $(VENV)/.dev
	$(BIN)/python -m pytest --collect-only -qq >$(VENV)/collected || { cat $(VENV)/collected; exit 1; }
	@touch $@

$(VENV_VERL)/.compiled: $(VENV_VERL)/.openrlhf
	$(VENV_VERL)/bin/python -m pytest --collect-only -qq tests/verl >$(VENV_VERL)/collected || { cat $(VENV_VERL)/collected; exit 1; }
	@touch $@

# Three workers on two cores: many tests wait for a browser, a server or another process. What is marked `thorough` is
# left out, and counted as deselected.
unit: $(VENV)/.compiled browser
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# The rest of the tests: more of a kind that `make test` has one of, and loads. The faults have a command of their own.
thorough: $(VENV)/.compiled $(VENV_VERL)/.compiled browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m thorough $(ARGS)
	$(VENV_VERL)/bin/python -m pytest -m thorough tests/verl $(ARGS)
	$(MAKE) numerical

# Which instructions torch computes with decides how sums are rounded: the rooms that compute, also under each set that
# this machine has besides the one torch takes by itself, and with two threads; `make test` under the furthest from it.
# Left out is what compares words, places, files or bits of one and the same set.
SETS ?= 9
NUMERICAL ?= tests/gradloc tests/tensors
EXACT := $(addprefix --ignore=tests/gradloc/test_gradloc_,$(addsuffix .py,budget causes nonfinite refusal replay rows trigger unharmed)) \
  $(addprefix --ignore=tests/tensors/test_tensors_,$(addsuffix .py,counting finite padded shipping text))
numerical: $(VENV)/.compiled
	@others=$$($(BIN)/python -c 'import torch; known = ["default", "avx2", "avx512"]; own = torch.backends.cpu.get_cpu_capability().lower(); \
	  print(*(known[:known.index(own)][:$(SETS)] if own in known else ["default"]), sep="\n")') && echo "$$others" \
	| xargs -r -P 2 -I@ env ATEN_CPU_CAPABILITY=@ OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q -p no:cacheprovider $(NUMERICAL) $(EXACT) $(ARGS)

# The verl integration, against the real verl: its transformers is not TRL's, so it has an environment of its own.
verl: $(VENV_VERL)/.compiled
	$(VENV_VERL)/bin/python -m pytest -n 2 --dist loadfile tests/verl $(ARGS)

# The OpenRLHF integration against OpenRLHF's own loss and training step.
openrlhf: $(VENV_VERL)/.openrlhf
	$(VENV_VERL)/bin/python -m pytest tests/openrlhf --ignore=tests/openrlhf/test_openrlhf_end_to_end.py $(ARGS)

# The same against whole runs of OpenRLHF, with DeepSpeed and Ray on a CPU. Not part of `make test`: DeepSpeed compiles
# two operators (g++), and all of it takes several minutes.
openrlhf-run: $(VENV_VERL)/.openrlhf
	$(VENV_VERL)/bin/python -m pytest tests/openrlhf/test_openrlhf_end_to_end.py $(ARGS)

# The integrations in fresh environments, against the newest versions the registry serves and the oldest we promise, and
# against verl before 0.9. Needs the network and minutes for each; `make nightly ARGS="--only trl --minutes 20"`.
nightly: $(if $(ARGS),,thorough)
	$(PYTHON) tests/nightly/newest.py $(ARGS)

# The documentation as a site, in build/site; links and anchors that lead nowhere fail.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What is published: the sdist, the wheel made of it, and what their checkers say.
DIST ?= dist
dist: $(VENV)/.dev
	rm -rf $(DIST)
	$(BIN)/python -m build --outdir $(DIST) .
	$(BIN)/twine check --strict $(DIST)/*
	$(BIN)/check-wheel-contents $(DIST)/*.whl

# The dashboard must start from an editable checkout and from a wheel alike.
wheel: $(VENV)/.dev
	$(BIN)/rlwatch ui --check
	$(MAKE) dist DIST=build/wheel
	$(BIN)/pip install --quiet --no-deps --target build/wheel/site build/wheel/*.whl
	cd build/wheel && PYTHONPATH=site ../../$(BIN)/python -m rlwatch.cli ui --check

# The browser tests drive Debian's chromium, one of them through Debian's nginx, those of the store a PostgreSQL of their
# own, and promtool checks the rules for Prometheus; without these they fail and say so. TEST_DB_URL names another PostgreSQL.
browser:
	@missing=""; \
	command -v chromium >/dev/null || test -n "$$RLWATCH_CHROMIUM" || missing="chromium"; \
	PATH="$$PATH:/usr/sbin" command -v nginx >/dev/null || missing="$$missing nginx-light"; \
	command -v openssl >/dev/null || missing="$$missing openssl"; \
	command -v promtool >/dev/null || missing="$$missing prometheus"; \
	command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$$missing postgresql"; \
	test -z "$$missing" || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	  else echo "not installed:$$missing; tests that need them will fail: install them (RLWATCH_CHROMIUM names another chromium)"; fi; }

# Which runs in trouble are found in time and at what price, beside simple rules and three packages of PyPI in environments
# of their own; with ARGS="--cadence 2,5,10,20 --page docs/detection.md" all of that page and README's part of it.
bench-detect: $(VENV)/.dev
	$(BIN)/python benchmarks/detection --peers build/peers --jobs $(JOBS) $(ARGS)

# Makes the leaderboard of forecasts anew: peers and our own alarms first, then the models, fold by fold. CORPUS is a
# folder of shards; FROM is a folder or URL that they are copied from if they are not there.
JOBS ?= 2
CORPUS ?= build/corpus
bench-forecast: $(VENV)/.dev
	$(if $(FROM),$(BIN)/python -m benchmarks.forecast fetch --out $(CORPUS) --from $(FROM))
	$(BIN)/python -m benchmarks.forecast tools $(CORPUS) --out build/forecast/tools --peers build/peers --jobs $(JOBS)
	$(BIN)/python -m benchmarks.forecast judge $(CORPUS) --out build/forecast --jobs $(JOBS) \
	  --page docs/forecast-leaderboard.md --command "make bench-forecast$(if $(ARGS), ARGS='$(ARGS)')" --scores "rlwatch's detectors=build/forecast/tools/rlwatch-any.csv" \
	  --scores "rlwatch's detectors, critical=build/forecast/tools/rlwatch-critical.csv" \
	  --scores "PyPI rlwatch 0.5.1=build/forecast/tools/rlwatch-0.5.1-any.csv" \
	  --scores "rldoctor 0.2.0=build/forecast/tools/rldoctor-0.2.0-any.csv" $(ARGS)

# The pages that are made from the code: tables of the catalogue and of metrics, commands, settings. A test says when stale.
docs-reference: $(VENV)/.dev
	$(BIN)/python -m rlwatch.catalogue
	$(BIN)/python docs/reference.py
	$(BIN)/python benchmarks/detector_pictures.py --words

# The pictures of README.md and docs/: the terminal and the dashboard, by the real command on the sample logs.
pictures: $(VENV)/.dev browser
	$(BIN)/python benchmarks/pictures.py $(ARGS)

# Every state of the dashboard on one sheet, light and dark, on three screens: look at it before a release.
sheet: $(VENV)/.dev browser
	$(BIN)/python benchmarks/contact_sheet.py $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/watching_cost.py
	$(BIN)/python benchmarks/log_call.py
	$(BIN)/python benchmarks/delivery_faults.py

# Seconds and bytes of the dashboard's list of runs, over 10, 100 and 1000 runs; the first chart of one beside other tools,
# which are installed into an environment of their own.
bench-app: $(VENV)/.dev browser
	$(BIN)/python benchmarks/app_cost.py --browser $(ARGS)
	$(BIN)/python benchmarks/app_peers.py --peers build/app-peers

# What a run survives: hundreds of kills, full disks and the like, and what is left beside its peers. It takes up to 20
# minutes on two cores and writes docs/reliability.md. Root is needed for the disks; what cannot be tried is named.
# An interrupted run goes on where it was: `make faults ARGS=--resume`.
faults: $(VENV)/.dev
	$(BIN)/python benchmarks/durability.py --kills 3 --jobs 6 --peers build/peers
	$(BIN)/python tests/faults/faults.py --jobs 6 --minutes 16 $(ARGS)

# How many of 300 small changes to four rooms their tests notice: an hour or more, and can be gone on with. The tests of
# the rooms run once with every line traced, then each change with the tests that execute its line.
mutants: $(VENV)/.dev
	nice $(BIN)/python benchmarks/mutation.py $(ARGS)

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlwatch needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

$(VENV_VERL)/.dev: pyproject.toml constraints-verl.txt | $(BIN)/python
	$(BIN)/python -m venv $(VENV_VERL)
	$(VENV_VERL)/bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints-verl.txt -e '.[dev-verl]'
	@touch $@

# DeepSpeed builds nothing; its build needs the environment's torch.
$(VENV_VERL)/.openrlhf: constraints-openrlhf.txt $(VENV_VERL)/.dev
	DS_BUILD_OPS=0 $(VENV_VERL)/bin/pip install --quiet --no-compile --disable-pip-version-check --no-deps --no-build-isolation \
	  -r constraints-openrlhf.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV_VERL) build dist
