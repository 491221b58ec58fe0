# Every target does all of its own set-up in .venv and can be repeated.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed

.PHONY: install train test lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# A small model on the text of the Python standard library: a few minutes on two cores, no download, no GPU.
train: install
	$(VENV)/bin/blocktrain train

test: install lint
	$(VENV)/bin/pytest -n auto --dist loadfile

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
