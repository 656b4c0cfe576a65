"""SIGTERM and SIGINT while a service still starts: also as process 1 of a container, which ignores what it does not handle."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.system

ROLES = ("learner", "actor", "evaluator")
SIGNALS = (signal.SIGTERM, signal.SIGINT)

# Python runs this file first: it stops the process where it would begin to import torch.
SITE = """
import sys, time
from pathlib import Path

def hold(event, arguments):
    if event == "import" and arguments[0] == "torch":
        Path("importing").touch()
        time.sleep(600)

sys.addaudithook(hold)
"""


def namespace():
    """Words that make a command process 1 of a PID namespace of its own; None where that is not allowed."""
    words = ["unshare", "--pid", "--fork"]
    if shutil.which(words[0]) is None or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        return None
    return words


@pytest.fixture
def importing(tmp_path, wait):
    """Starts `rookery ROLE` and returns its process when it is about to import torch."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    running = []

    def start(role, *before):
        words = [*before, sys.executable, "-m", "services.cli", role, "metrics.port=0"]
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        running.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        wait((tmp_path / "importing").exists, "it begins to import torch")
        return running[-1]

    yield start
    for process in running:
        for child in psutil.Process(process.pid).children() if process.poll() is None else ():
            child.kill()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("role", ROLES)
def test_a_signal_during_the_imports_ends_the_service(importing, role, number):
    """Nothing is to be saved yet, and nothing is to be said."""
    process = importing(role)
    process.send_signal(number)
    assert process.communicate(timeout=300)[0] == b""
    assert process.returncode == 128 + number


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_during_the_imports_ends_process_1(importing, number):
    """A pod that is deleted within its first seconds: without a handler it would go on until it is killed."""
    if (words := namespace()) is None:
        pytest.skip("no PID namespace may be made here (unshare --pid --fork)")
    process = importing("learner", *words)
    (first,) = psutil.Process(process.pid).children()
    first.send_signal(number)
    assert process.communicate(timeout=300)[0] == b""
    assert process.returncode == 128 + number


@pytest.mark.parametrize("role", ROLES)
def test_a_signal_between_the_entry_point_and_the_service_is_not_lost(tmp_path, role):
    """`rookery ROLE` replaces itself by the service, and a handler does not outlive that: a blocked signal does."""

    def signalled():
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.kill(os.getpid(), signal.SIGTERM)

    words = [sys.executable, "-m", "services.cli", role, "metrics.port=0"]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=300, check=False, preexec_fn=signalled)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + signal.SIGTERM, b"", b"")
    assert not list(tmp_path.iterdir())
