# make demo   see Sonde work, in about a minute          make lint    ruff and mypy
# make test   everything that is checked                 make bench   the numbers that the README publishes
# make clean  remove what was built                     make programs   the programs that CI has no time for
# make screens   run the samples of README.md and docs/ again and write their screens

PYTHON ?= python3
VENV := .venv
READING := .venv-reading
STAMP := $(VENV)/.sonde-stamp
READING_STAMP := $(READING)/.sonde-stamp
SOURCES := pyproject.toml constraints.txt $(wildcard src/sonde/statistics/native_src/*)
PIP := -m pip install --quiet --disable-pip-version-check

# Two cores are enough for all of it; torch's own threads would only get in each other's way.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := demo
.PHONY: demo test lint unit timing programs reading bench screens clean

demo: $(STAMP)
	@$(VENV)/bin/sonde demo

test: lint unit timing reading

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

unit: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --durations=40 -m "not timing and not slow and not reading"

# Each folder in a process of its own: what others leave in its memory counts.
timing: $(STAMP)
	$(VENV)/bin/python -m pytest -m "timing and not slow" tests/programs tests/unit/tuning
	$(VENV)/bin/python -m pytest -m "timing and not slow" tests/unit/tools tests/unit/profiler tests/unit/memory_profiler

# The programs that CI has no time for. It runs a part of them, chosen by the hash of the tree; PROGRAMS_SEED=… repeats a choice.
programs: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 -m "slow and not timing"
	$(VENV)/bin/python -m pytest -m "slow and timing"

# The reading half must work where torch is not installed: prove it from the built package, in an environment that has none.
READING_FOLDERS := runlog run_view rules report comparison profiler render export cli test_spike_detection.py
READING_TESTS := $(wildcard $(addprefix tests/unit/,$(READING_FOLDERS)))
reading: $(READING_STAMP)
	@rm -rf build
	$(READING)/bin/python $(PIP) --no-deps --force-reinstall .
	@rm -rf build
	$(READING)/bin/python -m pytest $(READING_TESTS) -n 2 -m reading -p no:cacheprovider

# Each exits with 1 if a budget does not hold; the second runs in any case.
bench: $(STAMP)
	-$(VENV)/bin/python benchmarks/overhead.py
	$(VENV)/bin/python benchmarks/footprint.py

screens: $(STAMP)
	$(VENV)/bin/python docs/update_sample_screens.py

$(STAMP): $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit("Sonde needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch and Sonde into $(VENV) (once; it may take minutes)"
	$(VENV)/bin/python $(PIP) -c constraints.txt torch==2.13.0
	$(VENV)/bin/python $(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(READING_STAMP): pyproject.toml
	@test -x $(READING)/bin/python || $(PYTHON) -m venv $(READING)
	$(READING)/bin/python $(PIP) numpy click rich pyarrow matplotlib pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

clean:
	rm -rf $(VENV) $(READING) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
