# Everything a newcomer needs. `make` or `make help` prints this file's targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
PRESET ?= pong
ARGS   ?=
PRESETS ?= pong cartpole
OVERLAY ?= local
REGISTRY ?=

KEYS    ?=
COMPOSE_FILES = --file docker/compose.yaml $(if $(KEYS),--file docker/compose.keys.yaml)
EVERY_SERVICE = --file docker/compose.yaml --profile policy-server --profile tensorboard

# Of the tests: two more than cores, since tests of real processes wait for half of their time.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)

VERSION     := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES      ?= actor learner
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# What of the build may be chosen beside TORCH_INDEX, as `make images NAME=VALUE`; docs/containers.md.
CHOICES     := BASE_IMAGE PIP_INDEX_URL PIP_NO_INDEX
COMPOSE     ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

.DEFAULT_GOAL := help
.PHONY: help setup mujoco box2d jax minigrid vizdoom pettingzoo popgym train test coverage test-pure test-wire test-service test-system test-cluster check format learning tables lockstep clean
.PHONY: chaos soak fuzz
.PHONY: k8s-render k8s-validate k8s-soak monitoring grafana-schema
.PHONY: bench bench-throughput bench-transport bench-replay bench-a3c bench-actors bench-sb3
.PHONY: images wheels up down logs test-docker

help: ## print this
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): requirements.lock pyproject.toml
	@echo 'installing what running needs into $(VENV): about a minute, and the download'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --requirement requirements.lock
	$(PIP) --no-deps --editable .
	@touch $@

$(DEV): $(STAMP) requirements-dev.lock
	@echo 'installing what tests and checks need into $(VENV)'
	$(PIP) --constraint requirements.lock --requirement requirements-dev.lock
	@touch $@

setup: $(DEV) ## make .venv with all pinned dependencies, those of the tests included

mujoco: $(STAMP) ## add MuJoCo to .venv, for halfcheetah, hopper, walker2d and those by SAC
	$(PIP) --constraint requirements.lock --editable '.[mujoco]'

box2d: $(STAMP) ## add Box2D to .venv, for lunarlander
	$(PIP) --constraint requirements.lock --editable '.[box2d]'

jax: $(STAMP) ## add JAX to .venv, for cartpole-jax
	$(PIP) --constraint requirements.lock --editable '.[jax]'

minigrid: $(STAMP) ## add MiniGrid to .venv, for minigrid-doorkey
	$(PIP) --constraint requirements.lock --editable '.[minigrid]'

vizdoom: $(STAMP) ## add ViZDoom to .venv, for vizdoom-basic
	$(PIP) --constraint requirements.lock --editable '.[vizdoom]'

pettingzoo: $(STAMP) ## add PettingZoo and MPE2 to .venv, for spread
	$(PIP) --constraint requirements.lock --editable '.[pettingzoo]'

popgym: $(STAMP) ## add POPGym to .venv, for popgym-repeat
	$(PIP) --constraint requirements.lock --editable '.[popgym]'

train: $(STAMP) ## learn Pong to 18 points on this machine (PRESET=cartpole ARGS="--seed 2" to change)
	$(BIN)/rookery train $(PRESET) $(ARGS)

test: $(DEV) ## all four rings of tests on all cores
	$(BIN)/pytest -m "not docker and not cluster" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: $(DEV) ## the same with branch coverage, which takes half as long again
	$(BIN)/coverage erase
	$(BIN)/pytest -m "not docker and not cluster" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered $(ARGS)

test-pure: $(DEV) ## the ring without sockets, files or threads: seconds
	$(BIN)/pytest -m pure $(ARGS)

test-wire: $(DEV) ## golden bytes, hostile bytes, transports
	$(BIN)/pytest -m wire $(ARGS)

test-service: $(DEV) ## services over the in-memory transport
	$(BIN)/pytest -m service $(ARGS)

test-system: $(DEV) ## real processes over loopback, killed and restarted
	$(BIN)/pytest -m system $(ARGS)

k8s-render: $(DEV) ## the manifests of one overlay, as a cluster gets them (OVERLAY=local, cpu or gpu)
	@test -d k8s/overlays/$(OVERLAY) || { echo "no overlay: found OVERLAY=$(OVERLAY), wanted one of" $$(ls k8s/overlays) >&2; exit 2; }
	@$(BIN)/kubectl kustomize k8s/overlays/$(OVERLAY)

k8s-validate: $(DEV) ## every overlay with every component: valid, restricted, and true to the code
	$(BIN)/pytest tests/k8s -m 'not system' $(ARGS)

k8s-soak: $(DEV) ## end an actor and a learner twenty times each as a cluster does (about four minutes)
	SOAK=20 $(BIN)/pytest tests/k8s/test_runner.py -k terminat $(ARGS)

test-docker: $(DEV) ## the images and compose on a real Docker Engine; skipped where there is none
	$(BIN)/pytest -m docker tests/docker $(ARGS)

test-cluster: $(DEV) ## a run on the cluster of the current kubeconfig, in a namespace of its own; skipped where there is none (REGISTRY=, of the images)
	REGISTRY=$(REGISTRY) $(BIN)/pytest -m cluster tests/cluster --exitfirst $(ARGS)

check: $(DEV) ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

grafana-schema: ## install Grafana's published schema, against which a test checks the dashboards (needs npm)
	npm ci --ignore-scripts --no-audit --no-fund --prefix tests/common/observability/grafana

format: $(DEV) ## rewrite the sources as `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

monitoring: $(STAMP) ## write rules, dashboards and tables of docs/ again (DOCS=URL: where docs/ is served, for links of alerts)
	$(BIN)/python -m common.observability $(if $(DOCS),--docs $(DOCS))

images: ## build the container images (IMAGES="learner-gpu" to choose; see docs/containers.md)
	for image in $(IMAGES); do \
	  docker build --file docker/Dockerfile --target $$image --tag rookery-$$image:$(VERSION) \
	    --label org.opencontainers.image.version=$(VERSION) \
	    --label org.opencontainers.image.revision=$$(git describe --always --dirty 2>/dev/null || echo unknown) \
	    $(foreach name,$(CHOICES),$(if $($(name)),--build-arg $(name)=$($(name)))) \
	    --build-arg TORCH_INDEX=$(TORCH_INDEX) $(ARGS) . || exit 1; \
	done

wheels: ## put what the images install into docker/wheels, for `make images PIP_NO_INDEX=1`
	wanted=$$($(PYTHON) docker/requirements.py) && echo "$$wanted" | $(PYTHON) -m pip download --quiet --dest docker/wheels \
	  --only-binary :all: --constraint requirements.lock $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --requirement /dev/stdin 'setuptools>=77'

up: ## start a run in containers (PRESET=cartpole ARGS="--scale actor=8" to change; KEYS=DIRECTORY); Grafana: localhost:3000
	$(if $(filter file,$(origin PRESET)),,PRESET=$(PRESET)) $(if $(KEYS),KEYS=$(abspath $(KEYS))) $(COMPOSE) $(COMPOSE_FILES) up --detach $(ARGS)

down: ## end it; the run is kept (ARGS=--volumes to forget it)
	$(COMPOSE) $(EVERY_SERVICE) down $(ARGS)

logs: ## what its containers say
	$(COMPOSE) $(EVERY_SERVICE) logs --follow $(ARGS)

bench: bench-throughput bench-transport bench-replay bench-a3c ## the four benchmarks below (half an hour; the machine must be idle)

bench-throughput: $(DEV) ## presets of all algorithms but SAC against their floors (ARGS="--preset pong-dqn" for one)
	$(BIN)/python -m benchmarks.throughput $(ARGS)

bench-transport: $(DEV) ## what one learner's I/O threads carry (ARGS=--keys: what encryption costs; ARGS="--actors 1 16 64 256 1000": CPU per message)
	$(BIN)/python -m benchmarks.transport $(ARGS)

bench-replay: $(DEV) ## sampling of 1 M Atari frames against copying (8 GB of memory)
	$(BIN)/python -m benchmarks.replay

bench-a3c: $(DEV) ## A3C by data against A3C by gradients, over a ladder of networks
	$(BIN)/python -m benchmarks.a3c

bench-actors: $(DEV) ## --actors auto beside a sweep of the number of actors
	$(BIN)/python -m benchmarks.actors $(ARGS)

bench-sb3: $(DEV) ## TD3 (`make mujoco`) or PPO (`ARGS=--preset ...`) beside Stable-Baselines3, which must be in .venv
	$(BIN)/python -m benchmarks.stable_baselines $(ARGS)

learning: $(DEV) ## runs of three seeds behind the learning claims (PRESETS="pong-dqn pendulum-td3" to choose; all take many hours)
	$(BIN)/python -m benchmarks.learning $(PRESETS)

tables: $(DEV) ## published comparisons: runs what is missing, writes docs/results.md (needs ARGS="atari mujoco control memory --seeds 1"; days)
	$(BIN)/python -m benchmarks.tables $(ARGS)

lockstep: $(DEV) ## two runs of one seed end with the same weights, on a machine loaded at random (about twenty minutes)
	$(BIN)/python -m benchmarks.lockstep

chaos: $(DEV) ## storms against a real run: kills, pauses, bad networks, full disks, floods; a table (50 minutes; ARGS="--short")
	$(BIN)/python -m benchmarks.chaos $(ARGS)

soak: $(DEV) ## two hours of a mildly disturbed run: memory, descriptors and threads must not grow (ARGS="--minutes 20")
	$(BIN)/python -m benchmarks.soak $(ARGS)

fuzz: $(DEV) ## a million inputs for the decoder, guided by coverage (ARGS="--inputs 10000")
	$(BIN)/python -m benchmarks.fuzz $(ARGS)

clean: ## remove .venv, caches and build leftovers (runs/ stays)
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
