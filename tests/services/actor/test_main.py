"""The actor's root against learners that do not want it, over loopback: one line, exit code 2."""

from __future__ import annotations

import logging
import threading

import msgpack
import pytest

from common.envs.make import spec_of
from common.runtime.tree import RunConfig, Settings
from common.transport.zmq import ZmqLearner
from common.wire import codec
from common.wire.messages import PROTOCOL_VERSION, Envelope, Refusal, Welcome
from services.actor.__main__ import main

pytestmark = pytest.mark.system


def frames(message):
    """A message of the run as bytes."""
    return codec.encode(Envelope(run="run-1", message=message))


def welcome(*, config=None, signature=None):
    """What a learner says that welcomes the peer."""
    settings = Settings()
    return Welcome(
        index=0,
        generation=0,
        config=RunConfig.of(settings, run_id="run-1").to_json() if config is None else config,
        env_signature=spec_of(settings.env).signature if signature is None else signature,
        schema=(),
        credits=1,
        version=-1,
        heartbeat_seconds=1.0,
    )


class Learner:
    """Gives one answer to everything."""

    def __init__(self, answer):
        """Bound to any free port."""
        self.transport, self.answer, self.over = ZmqLearner("tcp://127.0.0.1:0", linger=0.5), answer, threading.Event()
        self.endpoint = self.transport.endpoint
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        """Until the test is over."""
        while not self.over.is_set():
            arrived = self.transport.receive(0.1)
            if arrived is not None:
                self.transport.send(arrived[0], self.answer)
        self.transport.close()


@pytest.fixture
def learner():
    """Starts a learner with its one answer."""
    started = []

    def start(answer):
        started.append(Learner(answer))
        return started[-1].endpoint

    yield start
    for one in started:
        one.over.set()
        one.thread.join()


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    """An empty folder, no lower priority for the tester, and a log that is as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.runtime.root.yield_cpu", lambda *_: None)
    before, level = list(logging.getLogger().handlers), logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = before
    logging.getLogger().setLevel(level)


ANSWERS = {
    "another run": (
        lambda: frames(Refusal(code="run", reason="run: found 'a', wanted 'b'; restart", retry=False)),
        ["'a'", "'b'", "restart"],
    ),
    "another protocol": (
        lambda: [msgpack.packb({"v": PROTOCOL_VERSION + 1, "tag": "refusal"})],
        [f"found {PROTOCOL_VERSION + 1}", f"wanted {PROTOCOL_VERSION}", "same rookery version"],
    ),
    "another environment": (lambda: frames(welcome(signature="0123")), ["environment", "0123", "install"]),
    "another release's settings": (lambda: frames(welcome(config='{"run_id": 5}')), ["configuration", "same rookery version"]),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_a_learner_of_another_kind_costs_one_line_and_exit_code_2(what, learner, capsys):
    """A wrong address, a leftover process, a machine with another release: found, wanted, what to do; no traceback, no hang."""
    answer, says = ANSWERS[what]
    assert main(["--learner", learner(answer()), "--name", "one"]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "error:" in line]
    assert line.startswith("rookery actor: error: ")
    assert "Traceback" not in err
    for word in says:
        assert word in line


def test_a_run_that_is_over_sends_it_home_with_exit_code_0(learner, capsys):
    """Restarted by its supervisor just as the run ended: no blame, or the supervisor would give up a run that was solved."""
    answer = frames(Refusal(code="draining", reason="the run is ending", retry=False))
    assert main(["--learner", learner(answer), "--name", "one"]) == 0
    assert "error:" not in capsys.readouterr().err


def test_a_wrong_address_is_refused_before_anything_is_waited_for(capsys):
    """A typing slip in a manifest."""
    assert main(["--learner", "10.0.0.7:5700"]) == 2
    assert "tcp://host:port" in capsys.readouterr().err
