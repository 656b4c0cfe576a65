# Everything a newcomer needs. `make` or `make help` prints this file's targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PRESET ?= pong
ARGS   ?=
PRESETS ?= pong cartpole

.DEFAULT_GOAL := help
.PHONY: help setup mujoco train test test-pure test-wire test-service test-system check format learning lockstep clean
.PHONY: bench bench-throughput bench-transport bench-replay bench-a3c bench-td3 monitoring

help: ## print this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

setup: $(STAMP) ## make .venv with the pinned dependencies

mujoco: $(STAMP) ## add MuJoCo to .venv, for halfcheetah
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[mujoco]'

train: $(STAMP) ## learn Pong to 18 points on this machine (PRESET=cartpole ARGS="--seed 2" to change)
	$(BIN)/rookery train $(PRESET) $(ARGS)

test: $(STAMP) ## all four rings of tests, with branch coverage
	$(BIN)/coverage erase
	$(BIN)/pytest --cov --cov-report=term:skip-covered $(ARGS)

test-pure: $(STAMP) ## the ring without sockets, files or threads: seconds
	$(BIN)/pytest -m pure $(ARGS)

test-wire: $(STAMP) ## golden bytes, hostile bytes, transports
	$(BIN)/pytest -m wire $(ARGS)

test-service: $(STAMP) ## services over the in-memory transport
	$(BIN)/pytest -m service $(ARGS)

test-system: $(STAMP) ## real processes over loopback, killed and restarted
	$(BIN)/pytest -m system $(ARGS)

check: $(STAMP) ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

monitoring: $(STAMP) ## write alert rules and dashboards again, after a change in common/monitoring
	$(BIN)/python -m common.monitoring

bench: bench-throughput bench-transport bench-replay bench-a3c ## all benchmarks below (half an hour; the machine must be idle)

bench-throughput: $(STAMP) ## a preset of each algorithm against its floor (ARGS="--preset pong-dqn" for one)
	$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-transport: $(STAMP) ## what one learner's I/O thread admits
	$(BIN)/python -m benchmarks.transport

bench-replay: $(STAMP) ## sampling of 1 M Atari frames against copying (8 GB of memory)
	$(BIN)/python -m benchmarks.replay

bench-a3c: $(STAMP) ## A3C by data against A3C by gradients, over a ladder of networks
	$(BIN)/python -m benchmarks.a3c

bench-td3: $(STAMP) ## TD3 on HalfCheetah beside Stable-Baselines3's (needs `make mujoco` and stable-baselines3 in .venv)
	$(BIN)/python -m benchmarks.td3

learning: $(STAMP) ## runs of three seeds behind the learning claims (PRESETS="pong-dqn pendulum-td3" to choose; all take many hours)
	$(BIN)/python -m benchmarks.learning $(PRESETS)

lockstep: $(STAMP) ## two runs of one seed end with the same weights, on a machine loaded at random (about ten minutes)
	$(BIN)/python -m benchmarks.lockstep

clean: ## remove .venv, caches and build leftovers (runs/ stays)
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
