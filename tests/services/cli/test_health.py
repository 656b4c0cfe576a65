"""`rookery health`: what a container runtime hears of the service beside it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from common.observability.health import Health
from common.observability.http import HttpServer
from services.cli.app import main
from services.cli.inspect import command

pytestmark = pytest.mark.service


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """No settings from the tester's own environment."""
    for name in [name for name in os.environ if name.startswith("ROOKERY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine a server of the test may need seconds to answer."""
    monkeypatch.setattr(command, "HEALTH_TIMEOUT", 120.0)
    monkeypatch.setattr("common.observability.http.REQUEST_SECONDS", 120.0)


@pytest.fixture
def service():
    """A service that has just started, on a port of its own."""
    state = Health(deadline=120.0)
    with HttpServer(host="127.0.0.1", port=0, metrics=lambda: b"", health=state) as server:
        yield state, server.port


def asked(capsys, *words):
    """Exit code and what was said of `rookery health WORDS`."""
    code = main(["health", *words])
    return code, capsys.readouterr().out


def test_alive_is_not_ready(service, capsys):
    """A learner that loads its checkpoint is not to be killed, and not to be sent anybody."""
    state, port = service
    assert asked(capsys, f"metrics.port={port}") == (0, "ok\n")
    assert asked(capsys, f"metrics.port={port}", "--ready") == (1, "starting\n")
    state.ready()
    assert asked(capsys, f"metrics.port={port}", "--ready") == (0, "ok\n")


def test_a_loop_that_hangs_is_named(service, capsys):
    """`docker inspect` shows the line: it must say what is wrong."""
    state, port = service
    state.tick(doing="trains", within=-1.0)
    code, said = asked(capsys, f"metrics.port={port}")
    assert code == 1
    assert said.startswith("loop has not ticked for ")
    assert "while it trains" in said


def test_nobody_there_is_one_line_and_code_1(capsys):
    """The service has died, or has not bound its port yet."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        code, said = asked(capsys, f"metrics.port={nobody.getsockname()[1]}")
    assert code == 1
    assert said.startswith("no answer at 127.0.0.1:")
    assert said.count("\n") == 1


def test_somebody_else_on_the_port_is_not_alive(capsys):
    """It takes the connection and speaks no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0\r\n")

        other = threading.Thread(target=answer)
        other.start()
        code, said = asked(capsys, f"metrics.port={listener.getsockname()[1]}")
        other.join()
    assert (code, said.count("\n")) == (1, 1)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_the_environment_of_the_container_is_enough(service, host, monkeypatch, capsys):
    """The health check gets the image's variables, and no command line; what else is set is not its business."""
    _, port = service
    environ = {"ROOKERY_METRICS__PORT": str(port), "ROOKERY_METRICS__HOST": host, "ROOKERY_ALGORITHM__REPLAY_CAPACITY": "9000"}
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    assert asked(capsys) == (0, "ok\n")


def test_without_the_port_of_the_service_the_error_names_the_setting(capsys):
    """A service on any free port cannot be asked: the user hears which setting is missing."""
    assert main(["health"]) == 2
    assert "no port to ask" in (err := capsys.readouterr().err)
    assert "ROOKERY_METRICS__PORT" in err


def test_it_does_not_load_what_the_services_load():
    """It runs again and again beside services that have better use for the processor."""
    program = "import sys\nfrom services.cli.app import main\nmain(['health', 'metrics.port=1'])\nprint('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


def test_the_check_of_the_images_says_the_same_without_an_import_of_a_package(service):
    """Every container runs it every 30 s, and compose's learner every 5 s for the whole run."""
    folder = Path(__file__).parents[3] / "docker"
    assert "test" not in yaml.safe_load((folder / "compose.yaml").read_text())["services"]["learner"]["healthcheck"]
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (.*)$", (folder / "Dockerfile").read_text().replace("\\\n", ""), re.MULTILINE)
    python, option, program = json.loads(check)
    assert (python, option) == ("python3", "-ISc")  # without the path of packages
    state, port = service
    environ = {"ROOKERY_METRICS__HOST": "0.0.0.0", "ROOKERY_METRICS__PORT": str(port)}

    def said():
        words = [sys.executable, option, program.replace("timeout=3", "timeout=120")]
        ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300, check=False)
        return ended.returncode, ended.stdout.split(" for ")[0].strip()

    assert said() == (0, "ok")
    state.tick(doing="trains", within=-1.0)
    assert said() == (1, "loop has not ticked")
