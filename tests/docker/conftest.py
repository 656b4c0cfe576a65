"""A Docker Engine, the images, and a run in compose. Each is used where it exists, made where possible, or the tests are skipped.

Where no engine answers and the user is root, Debian's `dockerd` is started on a socket of its own, and ended. It keeps its images
under ~/.cache/rookery, so that the second time is fast. The base image is `$ROOKERY_TEST_BASE`, or made by docker/base-image.sh,
or pulled. What images install comes through the host's own pip, whatever package index that uses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "rookery" / "docker"
BASE = "rookery-test-base"
DEADLINE = 180.0  # seconds; reached only where something hangs
POLL = 0.2
CONTEXT = (
    "Makefile",
    "README.md",
    "common",
    "docker",
    "presets",
    "pyproject.toml",
    "requirements.lock",
    "rookery.py",
    "services",
    ".dockerignore",
)


def until(happened: Callable[[], Any], what: str, seconds: float = DEADLINE, found: Callable[[], str] = str) -> Any:
    """Call `happened` until its result is true, and return that result; the failure shows what `found` returns."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not (answer := happened()):
        assert time.monotonic() < deadline, f"never happened: {what}\n{found()}"
        pause.wait(POLL)
    return answer


@pytest.fixture(scope="session")
def wait() -> Callable[..., Any]:
    """`wait(happened, what)` calls `happened` until its result is true, and returns that result."""
    return until


class Shell:
    """Commands with the environment of these tests."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ` is added to the tester's own, less what that says of Rookery, or to the make that runs these tests."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(("ROOKERY_", "MAKE", "MFLAGS", "ARGS"))}
        self.environ = own | dict(environ)

    def __call__(
        self, *words: str, cwd: Path = ROOT, check: bool = True, seconds: float = 900.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command; a failure shows its output."""
        done = subprocess.run(
            words,
            cwd=cwd,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0 or not check, (
            f"{' '.join(words)}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done


def _missing(*programs: str) -> list[str]:
    return [program for program in programs if shutil.which(program) is None]


@pytest.fixture(scope="session")
def engine() -> Iterator[Shell]:
    """A shell in which `docker` works: with the running engine, or one started for the tests."""
    if missing := _missing("docker", "make"):
        pytest.skip(f"no {', '.join(missing)} here")
    shell = Shell({})
    if shell("docker", "version", check=False).returncode == 0:
        yield shell
        return
    if missing := _missing("dockerd", "iptables"):
        pytest.skip(f"no Docker Engine answers, and there is no {', '.join(missing)} to start one")
    if os.geteuid() != 0:
        pytest.skip("no Docker Engine answers, and only root can start one")
    with tempfile.TemporaryDirectory(prefix="rookery-docker-") as folder:
        yield from _started(Path(folder))


def _started(folder: Path) -> Iterator[Shell]:
    socket = f"unix://{folder}/docker.sock"
    places = ["--data-root", str(CACHE), "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/dockerd.pid"]
    CACHE.mkdir(parents=True, exist_ok=True)
    with (folder / "dockerd.log").open("w+") as log:
        daemon = subprocess.Popen(["dockerd", "--host", socket, *places], stdout=log, stderr=log, start_new_session=True)
        shell = Shell({"DOCKER_HOST": socket})
        try:
            deadline = time.monotonic() + 60.0
            while shell("docker", "version", check=False).returncode != 0:
                if daemon.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    pytest.skip(f"dockerd cannot run here: {log.read().strip().splitlines()[-1:]}")
                threading.Event().wait(POLL)
            yield shell
        finally:
            daemon.terminate()
            daemon.wait(60.0)


@pytest.fixture(scope="session")
def base(engine: Shell) -> str:
    """The name of a base image."""
    if chosen := os.environ.get("ROOKERY_TEST_BASE"):
        return chosen
    if engine("docker", "image", "inspect", BASE, check=False).returncode == 0:
        return BASE
    if os.geteuid() == 0 and not _missing("debootstrap"):
        engine(str(ROOT / "docker" / "base-image.sh"), BASE)
        return BASE
    pulled = "python:3.11-slim-bookworm"
    if engine("docker", "pull", pulled, check=False).returncode != 0:
        pytest.skip(f"no base image: {pulled} cannot be pulled, and only root can make one with debootstrap")
    return pulled


@pytest.fixture(scope="session")
def images(engine: Shell, base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The version under which the images are built, by the commands of a user, from a copy of what git holds."""
    context = tmp_path_factory.mktemp("context")
    for name in CONTEXT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__", "*.whl", "*.crt"))
        else:
            shutil.copy(ROOT / name, context / name)
    cpu = ["TORCH_INDEX="] if version("torch").endswith("+cpu") else []  # the tester's own index has one without CUDA
    engine("make", "wheels", *cpu, cwd=context)
    chosen = "IMAGES=env-worker actor learner"
    engine("make", "images", chosen, f"BASE_IMAGE={base}", "PIP_NO_INDEX=1", *cpu, cwd=context, seconds=1800.0)
    return version("rookery")


@pytest.fixture(scope="session")
def compose(engine: Shell) -> list[str]:
    """The available compose command: version 2, or docker-compose."""
    if engine("docker", "compose", "version", check=False).returncode == 0:
        return ["docker", "compose"]
    if _missing("docker-compose"):
        pytest.skip("no docker compose here")
    return ["docker-compose"]


class Colony:
    """A run in compose, under a name of its own, with ports of its own."""

    def __init__(self, shell: Shell, command: list[str], files: list[Path], ports: Mapping[str, int], folder: Path) -> None:
        """Nothing is started yet."""
        self.shell, self.ports = Shell(shell.environ | {name: str(port) for name, port in ports.items()}), ports
        self.command, self.folder = [*command, "--project-name", "rookery-test"], folder
        for file in files:
            self.command += ["--file", str(file)]

    def compose(self, *words: str, check: bool = True) -> str:
        """Return the output of `compose WORDS`."""
        return self.shell(*self.command, *words, check=check).stdout

    def containers(self, service: str) -> list[dict[str, Any]]:
        """Return the output of `docker inspect` for each container of a service."""
        found = self.compose("ps", "--quiet", service).split()
        return json.loads(self.shell("docker", "inspect", *found).stdout) if found else []

    def get(self, port: str, path: str) -> Any:
        """JSON from a published port; None where there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=5.0) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def status(self) -> dict[str, Any]:
        """The learner's /status."""
        return self.get("LEARNER_PORT", "/status") or {}

    def state(self) -> str:
        """Prometheus's targets, the containers and the ends of their logs."""
        targets = (self.get("PROMETHEUS_PORT", "/api/v1/targets?state=active") or {}).get("data", {}).get("activeTargets")
        found = [f"{at['scrapeUrl']} {at['health']} {at['lastError']}" for at in targets or []]
        return "\n".join([*(found or [f"targets: {targets}"]), self.compose("ps", "--all"), self.compose("logs", "--tail", "12")])

    def query(self, text: str) -> list[float]:
        """The values of an instant query to Prometheus."""
        answer = self.get("PROMETHEUS_PORT", f"/api/v1/query?query={urllib.parse.quote(text)}")
        return [float(sample["value"][1]) for sample in answer["data"]["result"]] if answer else []


@pytest.fixture(scope="session")
def prometheus_image(engine: Shell, base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with the Prometheus of this machine, since its own cannot be had without a registry."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus here (Debian's package has it)")
    context = tmp_path_factory.mktemp("prometheus")
    shutil.copy(program, context / "prometheus")
    lines = [f"FROM {base}", "COPY prometheus /bin/prometheus", "RUN install -d -o 65534 -g 65534 /prometheus"]
    (context / "Dockerfile").write_text("\n".join([*lines, 'ENTRYPOINT ["prometheus"]']))
    engine("docker", "build", "--tag", "rookery-test-prometheus", str(context))
    return "rookery-test-prometheus"


@pytest.fixture(scope="module")
def colony(
    engine: Shell, images: str, compose: list[str], prometheus_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Colony]:
    """Pong, with checkpoints every five seconds; taken down at the end, volumes and all."""
    from services.cli.train.ports import Ports

    names = ("LEARNER_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "TENSORBOARD_PORT")
    files = [ROOT / "docker" / "compose.yaml", HERE / "compose.test.yaml"]
    shell = Shell(engine.environ | {"VERSION": images, "PROMETHEUS_IMAGE": prometheus_image})
    with Ports() as ports:
        built = Colony(shell, compose, files, dict(zip(names, ports.find(4), strict=True)), tmp_path_factory.mktemp("colony"))
        yield built
        built.compose("down", "--volumes", "--timeout", "20", check=False)
