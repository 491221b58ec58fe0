# Every target does all of its own set-up in .venv and can be repeated.
PYTHON ?= python3
VENV   := .venv
STAMP  := $(VENV)/.installed
# Half as many again as there are cores: much of what is tested waits for processes and sockets.
TESTERS = $(shell $(VENV)/bin/python -c "from blocktrain.cli.environment import cores; print(cores() * 3 // 2)")

.PHONY: install browser train test lint docs dist walk clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# A small model on the text of the Python standard library: a few minutes on two cores, no download, no GPU.
train: install
	$(VENV)/bin/blocktrain train

# The page is tested in a real browser. Where there is none and this user may install Debian's, it is installed.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && echo "installing chromium" \
	&& { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >/dev/null; }; } \
	|| echo "no chromium here: the tests of the page will be skipped"

# Tests start hundreds of processes: where Python is told to write no bytecode, each of them would compile all sources.
test: install browser lint
	$(VENV)/bin/python -m compileall -q src tests
	$(VENV)/bin/pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder --durations=20

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The documentation as a site; `mkdocs serve` shows it while you write.
docs: install
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

# A source distribution and a wheel, in dist/. The wheel needs none of the development tools.
dist: install
	rm -rf dist build/lib build/bdist.*
	$(VENV)/bin/python -m build --no-isolation --outdir dist
	@ls -l dist

# The files that one round of training and one request of serving pass, in order.
walk: install
	$(VENV)/bin/python tests/system/walk.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
