# Everything a newcomer needs. `make` or `make help` prints this file's targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PRESET ?= pong
ARGS   ?=
PRESETS ?= pong cartpole
OVERLAY ?= local

KEYS    ?=
COMPOSE_FILES = --file docker/compose.yaml $(if $(KEYS),--file docker/compose.keys.yaml)

# Of the tests: one more than cores, since tests of real processes wait for half of their time.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

VERSION     := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES      ?= actor learner
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# What of the build may be chosen, as `make images NAME=VALUE`; docs/containers.md.
CHOICES     := BASE_IMAGE PIP_INDEX_URL PIP_NO_INDEX TORCH_INDEX
COMPOSE     ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.DEFAULT_GOAL := help
.PHONY: help setup mujoco train test coverage test-pure test-wire test-service test-system check format learning lockstep clean
.PHONY: chaos soak fuzz
.PHONY: k8s-render k8s-validate k8s-soak monitoring
.PHONY: bench bench-throughput bench-transport bench-replay bench-a3c bench-actors bench-td3
.PHONY: images wheels up down logs test-docker

help: ## print this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock pyproject.toml
	@echo 'installing the pinned dependencies into $(VENV): some minutes'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

setup: $(STAMP) ## make .venv with the pinned dependencies

mujoco: $(STAMP) ## add MuJoCo to .venv, for halfcheetah
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable '.[mujoco]'

train: $(STAMP) ## learn Pong to 18 points on this machine (PRESET=cartpole ARGS="--seed 2" to change)
	$(BIN)/rookery train $(PRESET) $(ARGS)

test: $(STAMP) ## all four rings of tests on all cores
	$(BIN)/pytest -m "not docker" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: $(STAMP) ## the same with branch coverage, which takes half as long again
	$(BIN)/coverage erase
	$(BIN)/pytest -m "not docker" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered $(ARGS)

test-pure: $(STAMP) ## the ring without sockets, files or threads: seconds
	$(BIN)/pytest -m pure $(ARGS)

test-wire: $(STAMP) ## golden bytes, hostile bytes, transports
	$(BIN)/pytest -m wire $(ARGS)

test-service: $(STAMP) ## services over the in-memory transport
	$(BIN)/pytest -m service $(ARGS)

test-system: $(STAMP) ## real processes over loopback, killed and restarted
	$(BIN)/pytest -m system $(ARGS)

k8s-render: $(STAMP) ## the manifests of one overlay, as a cluster gets them (OVERLAY=local, cpu or gpu)
	@test -d k8s/overlays/$(OVERLAY) || { echo "no overlay: found OVERLAY=$(OVERLAY), wanted one of" $$(ls k8s/overlays) >&2; exit 2; }
	@$(BIN)/kubectl kustomize k8s/overlays/$(OVERLAY)

k8s-validate: $(STAMP) ## every overlay with every component: valid, restricted, and true to the code
	$(BIN)/pytest tests/k8s -m 'not system' $(ARGS)

k8s-soak: $(STAMP) ## end an actor and a learner twenty times each as a cluster does (about four minutes)
	SOAK=20 $(BIN)/pytest tests/k8s/test_runner.py -k terminat $(ARGS)

test-docker: $(STAMP) ## the images and compose on a real Docker Engine; skipped where there is none
	$(BIN)/pytest -m docker tests/docker $(ARGS)

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

images: ## build the container images (IMAGES="learner-gpu" to choose; see docs/containers.md)
	for image in $(IMAGES); do \
	  docker build --file docker/Dockerfile --target $$image --tag rookery-$$image:$(VERSION) \
	    --label org.opencontainers.image.version=$(VERSION) \
	    --label org.opencontainers.image.revision=$$(git describe --always --dirty 2>/dev/null || echo unknown) \
	    $(foreach name,$(CHOICES),$(if $($(name)),--build-arg $(name)=$($(name)))) $(ARGS) . || exit 1; \
	done

wheels: ## put what the images install into docker/wheels, for `make images PIP_NO_INDEX=1`
	$(PYTHON) docker/requirements.py | $(PYTHON) -m pip download --quiet --dest docker/wheels --only-binary :all: \
	  --constraint requirements.lock $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement /dev/stdin 'setuptools>=77'

up: ## start a run in containers (PRESET=cartpole ARGS="--scale actor=8" to change; KEYS=DIRECTORY); Grafana: localhost:3000
	PRESET=$(PRESET) KEYS=$(abspath $(KEYS)) $(COMPOSE) $(COMPOSE_FILES) up --detach $(ARGS)

down: ## end it; the run is kept (ARGS=--volumes to forget it)
	$(COMPOSE) --file docker/compose.yaml down $(ARGS)

logs: ## what its containers say
	$(COMPOSE) --file docker/compose.yaml logs --follow $(ARGS)

bench: bench-throughput bench-transport bench-replay bench-a3c ## all benchmarks below (half an hour; the machine must be idle)

bench-throughput: $(STAMP) ## a preset of each algorithm against its floor (ARGS="--preset pong-dqn" for one)
	$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-transport: $(STAMP) ## what one learner's I/O thread admits (ARGS=--keys: what encryption costs)
	$(BIN)/python -m benchmarks.transport $(ARGS)

bench-replay: $(STAMP) ## sampling of 1 M Atari frames against copying (8 GB of memory)
	$(BIN)/python -m benchmarks.replay

bench-a3c: $(STAMP) ## A3C by data against A3C by gradients, over a ladder of networks
	$(BIN)/python -m benchmarks.a3c

bench-actors: $(STAMP) ## --actors auto beside a sweep of the number of actors
	$(BIN)/python -m benchmarks.actors $(ARGS)

bench-td3: $(STAMP) ## TD3 on HalfCheetah beside Stable-Baselines3's (needs `make mujoco` and stable-baselines3 in .venv)
	$(BIN)/python -m benchmarks.td3

learning: $(STAMP) ## runs of three seeds behind the learning claims (PRESETS="pong-dqn pendulum-td3" to choose; all take many hours)
	$(BIN)/python -m benchmarks.learning $(PRESETS)

lockstep: $(STAMP) ## two runs of one seed end with the same weights, on a machine loaded at random (about four minutes)
	$(BIN)/python -m benchmarks.lockstep

chaos: $(STAMP) ## storms against a real run: kills, pauses, bad networks, full disks, floods; a table (half an hour; ARGS="--short")
	$(BIN)/python -m benchmarks.chaos $(ARGS)

soak: $(STAMP) ## two hours of a mildly disturbed run: memory, descriptors and threads must not grow (ARGS="--minutes 20")
	$(BIN)/python -m benchmarks.soak $(ARGS)

fuzz: $(STAMP) ## a million inputs for the decoder, guided by coverage (ARGS="--inputs 10000")
	$(BIN)/python -m benchmarks.fuzz $(ARGS)

clean: ## remove .venv, caches and build leftovers (runs/ stays)
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
