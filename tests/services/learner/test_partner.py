"""The second process of a learner: the same result as in one, and what happens when it, or we, go."""

import logging
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from common.algorithms.api import Progress, Sample
from common.algorithms.parts import in_turn
from common.algorithms.settings.td3 import TD3Settings
from common.algorithms.td3 import TD3
from common.algorithms.trajectory import trajectory_schema
from common.envs.spec import ActionSpec, EnvSpec
from common.errors import InternalError
from common.models.spec import ModelSettings
from services.learner import partner as module
from services.learner.partner import Partner, partnered

pytestmark = pytest.mark.system

DEADLINE = 60.0  # for a process to start or to end; only a fault lets it pass
ACTION = ActionSpec(n=0, shape=(2,), low=(-1.0, 0.0), high=(3.0, 10.0))
ENV = EnvSpec(observation_shape=(3,), observation_dtype="float32", action=ACTION, frame_stack=1, frame_skip=1)


@pytest.fixture(autouse=True)
def _two_cores_and_one_thread(monkeypatch):
    monkeypatch.setattr(module, "cores", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def until(happened, what):
    """Ask again and again until the answer is true."""
    deadline, pause = time.monotonic() + DEADLINE, threading.Event()
    while not happened():
        assert time.monotonic() < deadline, f"it never happened: {what}"
        pause.wait(0.02)


def gone(pid):
    """Whether there is no such process, or nobody who asks how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Exchange:
    """Part `rank` of two, which makes of the other's number its own."""

    def __init__(self, board, rank):
        self.board, self.rank = board, rank

    def run(self):
        """Five rounds."""
        own = self.rank + 1.0
        for _ in range(5):
            self.board[self.rank] = own
            yield
            own = 0.5 * own + float(self.board[1 - self.rank])
            yield
        self.board[self.rank] = own


class Fails:
    """A part that breaks."""

    def run(self):
        """After the first meeting."""
        yield
        raise ZeroDivisionError


class Waits:
    """A part that takes its time, and shows how many threads it has."""

    def __init__(self, board):
        self.board = board

    def run(self):
        """Until the board says so."""
        self.board[1] = torch.get_num_threads()
        while not self.board[0]:
            time.sleep(0)
        yield


class Stuck:
    """A part that never comes to the meeting."""

    def run(self):
        """Waits for nothing."""
        threading.Event().wait()
        yield


def test_both_parts_read_what_the_other_wrote_before_they_met():
    """As one after the other; and again, on the same board."""
    boards = [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    here, there = ([Exchange(board, rank) for rank in (0, 1)] for board in boards)
    partner = Partner(there[1])
    try:
        partner(there)  # very likely before it is up: then all is computed here
        in_turn(here)
        assert torch.equal(*boards)
        until(lambda: partner.up, "the partner is up")
        for _ in range(3):
            boards[1].zero_()
            partner(there)
            assert torch.equal(*boards)
    finally:
        partner.close()
    assert not psutil.pid_exists(partner.pid)


@pytest.mark.parametrize(("part", "found"), [(Fails(), "exit code 1"), (Stuck(), "nothing from process .* for 0.2 s")])
def test_a_partner_that_breaks_or_hangs_is_told_at_once_and_leaves_nobody(part, found, monkeypatch):
    """Half of a step was taken: the learner must go back to its checkpoint."""
    monkeypatch.setattr(module, "LEAVE_SECONDS", 1.0 if isinstance(part, Stuck) else DEADLINE)
    partner = Partner(part, patience=0.2 if isinstance(part, Stuck) else DEADLINE)
    try:
        until(lambda: partner.up, "the partner is up")
        ours = Exchange(torch.zeros(2), 0)
        with pytest.raises(InternalError, match=rf"half of a gradient step is missing: found {found}.*--resume"):
            partner([ours, part])
    finally:
        partner.close()
    assert not psutil.pid_exists(partner.pid)


def test_a_partner_that_never_comes_up_costs_a_line_and_half_of_the_speed(caplog):
    """Killed while it imports, by a machine that is out of memory: nothing is half done, and all is computed here."""
    here, there = ([Exchange(torch.zeros(2), rank) for rank in (0, 1)] for _ in range(2))
    partner = Partner(there[1])
    try:
        psutil.Process(partner.pid).kill()
        with caplog.at_level(logging.WARNING):
            until(lambda: not partner.up and "no_partner" in caplog.text, "it is noticed")
            partner(there)
        in_turn(here)
        assert torch.equal(here[0].board, there[0].board)
        assert caplog.text.count("no_partner") == 1
    finally:
        partner.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_partner_leaves_signals_to_the_learner_and_has_as_many_threads(number):
    """Ctrl-C, or a scheduler that signals the whole group: the learner saves, and closes it."""
    torch.set_num_threads(3)
    board = torch.zeros(2)
    parts = [Exchange(torch.zeros(2), 0), Waits(board)]
    parts[0].run = lambda: iter([None])  # one meeting
    partner = Partner(parts[1])
    try:
        until(lambda: partner.up, "the partner is up")
        call = threading.Thread(target=partner, args=(parts,))
        call.start()
        until(lambda: board[1] > 0, "it computes")
        psutil.Process(partner.pid).send_signal(number)
        board[0] = 1
        call.join(DEADLINE)
        assert not call.is_alive()
        assert board[1] == 3
        partner([parts[0], None])  # and again
    finally:
        partner.close()


OWNER = """
import signal
from services.learner.partner import Partner

class Idle:
    def run(self):
        yield

if __name__ == "__main__":
    partner = Partner(Idle())
    while not partner.up:
        pass
    print(partner.pid, flush=True)
    signal.pause()
"""


def test_a_partner_ends_with_its_learner_however_that_ends(tmp_path):
    """Killed, it cannot say so."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER, encoding="utf-8")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        assert psutil.pid_exists(pid)
        owner.send_signal(signal.SIGKILL)
    until(lambda: gone(pid), "the partner is gone")


def sample(seq):
    """A message of random play, 8 env steps in each of 2 environments."""
    rng = np.random.default_rng(seq)
    arrays = {
        spec.name: np.zeros([max(0, size) for size in spec.shape], spec.dtype)
        for spec in trajectory_schema(ENV, length=8, num_envs=2, recorded=())
    }
    arrays["obs"][:] = rng.normal(size=arrays["obs"].shape)
    arrays["action"][:] = rng.uniform(ACTION.low, ACTION.high, arrays["action"].shape)
    arrays["reward"][:] = rng.normal(size=arrays["reward"].shape)
    arrays["valid"][:] = True
    return Sample(peer="a", seq=seq, version=0, env_steps=16, arrays=arrays)


@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"precision": "bf16", "policy_delay": 3}])
def test_td3_trains_to_the_very_same_bits_with_a_partner(settings):
    """Weights, targets, optimizers and metrics, through the moment at which the partner joins in and a checkpoint."""
    common = {"replay_capacity": 2_000, "warmup": 16, "minibatch": 32, "samples_per_insert": 32.0, "random_env_steps": 16}
    model = ModelSettings(hidden=(32, 16), layer_norm="policy_delay" in settings)
    alone, paired = (TD3(settings=TD3Settings(**common, **settings), model=model, env=ENV, seed=1) for _ in range(2))

    def train(algorithm, seq):
        batch = algorithm.collate([sample(seq)])
        return algorithm.update(batch, Progress(env_steps=seq, env_steps_planned=1000, version=seq)).metrics

    def state(algorithm):
        found = algorithm.state_dict()
        tensors = {f"{group}/{name}": value for group in ("parameters", "targets") for name, value in found[group].items()}
        adams = ("actor_adam", "critic_adam")
        return tensors | {
            f"{group}/{name}/{key}": v for group in adams for name, kept in found[group].items() for key, v in kept.items()
        }

    with partnered(paired):
        for seq in range(12):
            if seq == 4:
                until(lambda: paired.run_parts.up, "the partner is up")
            if seq == 8:
                paired.load_state_dict(alone.state_dict())
            assert train(alone, seq) == train(paired, seq)
        wanted, found = state(alone), state(paired)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
        assert not torch.equal(wanted["parameters/actor.head.weight"], wanted["targets/actor.head.weight"])


def test_what_cannot_be_divided_has_no_partner():
    """Nothing is started, and nothing changed."""
    for algorithm in (SimpleNamespace(), SimpleNamespace(parts=[Fails()], run_parts=in_turn)):
        before = dict(vars(algorithm))
        with partnered(algorithm):
            assert vars(algorithm) == before


def test_on_one_core_there_is_no_partner(monkeypatch):
    """Two processes would take turns on it."""
    monkeypatch.setattr(module, "cores", lambda: 1)
    algorithm = SimpleNamespace(parts=[Fails(), Fails()], run_parts=in_turn)
    with partnered(algorithm):
        assert algorithm.run_parts is in_turn


@pytest.mark.parametrize(("threads", "each"), [(1, 1), (2, 1), (5, 2)])
def test_learner_and_partner_share_the_threads(threads, each, monkeypatch):
    """As many as a pod's limit of cores, say."""
    monkeypatch.setattr(module, "Partner", lambda _part: SimpleNamespace(pid=1, close=lambda: None))
    torch.set_num_threads(threads)
    algorithm = SimpleNamespace(parts=[Fails(), Fails()], run_parts=in_turn)
    with partnered(algorithm):
        assert algorithm.run_parts is not in_turn
        assert torch.get_num_threads() == each
    assert algorithm.run_parts is in_turn


@pytest.mark.parametrize("error", [OSError("no process"), RuntimeError("unable to allocate shared memory")])
def test_a_machine_that_has_no_room_for_a_partner_trains_without_one(error, monkeypatch, caplog):
    """A container whose /dev/shm is too small, say: slower, and said so."""

    def refuse(_part):
        raise error

    monkeypatch.setattr(module, "Partner", refuse)
    algorithm = SimpleNamespace(parts=[Fails(), Fails()], run_parts=in_turn)
    torch.set_num_threads(2)
    with caplog.at_level(logging.WARNING), partnered(algorithm):
        assert algorithm.run_parts is in_turn
        assert torch.get_num_threads() == 2
    assert "no_partner" in caplog.text
