"""Fixtures and order of all tests."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import resource
import runpy
import signal
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failing test: time is measured in benchmarks/, not asserted here. Examples are the same each time, so that
# a failure is that of the change; `make fuzz` searches for new ones.
settings.register_profile("rookery", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rookery")

# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests of all workers share the cores: a second thread of torch would mostly wait, and burn CPU while it does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of the tester's shell and its proxy the tests know nothing; those of colours, terminals and proxies set their own.
for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"
direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, [direct, "127.0.0.1", "localhost"]))

SLOW_TORCH = Path(__file__).parent / "support" / "slow_torch"
if os.environ.get("SLOW_TORCH") and str(SLOW_TORCH) not in (path := os.environ.get("PYTHONPATH", "")):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SLOW_TORCH), path]))  # of all processes from here on
    runpy.run_path(str(SLOW_TORCH / "sitecustomize.py"))


def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the files, and the tests of each, in a random order")


RINGS = {"pure", "wire", "service", "system", "docker", "cluster"}


def pytest_collection_modifyitems(config, items):
    """Refuse tests of no ring or of two, and mix the files of all: tests of real processes wait while others compute.

    Tests of one file keep their order.
    """
    for item in items:
        if len(rings := RINGS.intersection(mark.name for mark in item.iter_markers())) != 1:
            raise pytest.UsageError(f"{item.nodeid}: found the marks {sorted(rings)}, wanted one of {sorted(RINGS)}")
    if (seed := config.getoption("--shuffle")) is not None:
        chance = random.Random(seed)
        files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
        items[:] = [item for tests in chance.sample(files, len(files)) for item in chance.sample(tests, len(tests))]
        return
    items.sort(key=lambda item: zlib.crc32(item.nodeid.partition("::")[0].encode()))


def pytest_collection_finish():
    """Leave the objects of torch and of the test modules out of the garbage collector, a twentieth of the tests' time."""
    gc.freeze()


@pytest.fixture(autouse=True)
def root_logger():
    """The root logger is after each test as it was before: a service that a test runs sets it for its own process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def no_room():
    """A context in which no file of this process, and of those it starts, can grow: what a write meets on a full disk."""

    @contextmanager
    def full():
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run with one checkpoint of random weights: `make_run(*overrides, preset=, version=)`."""
    import torch

    from common.algorithms.registry import build_algorithm
    from common.config.load import as_yaml, load_settings
    from common.envs.trial import spec_of
    from common.models.snapshot import ParameterLayout
    from common.runtime import run_directory
    from common.runtime.checkpoint_files import Checkpoint
    from common.runtime.checkpoints import CheckpointStore

    def write(*overrides, preset="cartpole", version=7, seed=1, path=None):
        settings = load_settings(preset=preset, overrides=overrides, environ={}).settings
        algorithm = build_algorithm(
            settings.algorithm, model=settings.model, env=spec_of(settings.env), seed=seed, length=settings.rollout.length
        )
        with torch.no_grad():
            for parameter in algorithm.model.parameters():  # heads begin near zero, where actions would hardly differ
                parameter.add_(torch.empty_like(parameter).normal_(std=0.3, generator=torch.Generator().manual_seed(seed)))
        run = run_directory.RunDirectory(path or tmp_path / "run")
        if not run.begun:
            run_directory.create(run.path, config=as_yaml(settings), command=["rookery", "train", preset])
        CheckpointStore(run.checkpoints, keep=3).save(
            Checkpoint(
                run_id="tiny",
                version=version,
                env_steps=1000 * version,
                architecture=ParameterLayout.of(algorithm.model).fingerprint,
                counters={},
                state=algorithm.state_dict(),
            )
        )
        return run, algorithm

    return write


@pytest.fixture
def one_torch_thread():
    """As in a learner in lockstep: how a sum is shared decides how it is rounded."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
