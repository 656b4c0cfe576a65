"""The lockstep benchmark without its runs: when two runs agree, what the page says, and that the load comes and goes."""

import multiprocessing
import signal

import pytest

from benchmarks import killed, lockstep, resume
from benchmarks.lockstep import Case, Pair, loaded, report
from services.cli.train.exit_with_parent import wrapper
from services.cli.train.ports import Ports

pytestmark = pytest.mark.system

CASE = Case(preset="pong", actors=3, overrides=("target.env_steps=9",))


def summary(**changes):
    """Return the summary of a run."""
    known = {"parameters_sha256": "ab" * 32, "reproducible": True, "learner_updates": 4, "env_steps": 1234}
    return known | {"wall_seconds": 90.0, "policy_lag": {"max": 0}} | changes


@pytest.mark.parametrize(
    ("second", "agree"),
    [({}, True), ({"parameters_sha256": "cd" * 32}, False), ({"reproducible": False}, False), ({"learner_updates": 0}, False)],
)
def test_runs_agree_by_their_hashes_and_only_where_lockstep_held(second, agree):
    """Equal by luck is not equal by promise."""
    pair = Pair(case=CASE, summaries=[summary(), summary(**second)])
    assert pair.agree == agree
    page = report([pair])
    assert "`rookery train pong run.mode=lockstep actor.count=3 target.env_steps=9` | 4" in page
    assert " | 1,234 | 1.50 | 0 | `abab" in page
    assert f"{int(agree)} of 1 pairs agree" in page


def test_no_run_without_a_hash_agrees():
    """A run that was killed left none."""
    assert not Pair(case=CASE, summaries=[summary(parameters_sha256=None)] * 2).agree


@pytest.mark.parametrize(("kills", "code"), [({"learner": 12, "actor": 8}, 0), ({"learner": 10, "actor": 9}, 1), ({}, 1)])
def test_a_run_that_ended_before_all_its_kills_shows_nothing(kills, code, monkeypatch):
    ledger = {"dropped": {"rolled_back": 3}}
    pair = Pair(case=CASE, summaries=[summary(ledger=ledger)] * 2, kills=kills)
    monkeypatch.setattr(lockstep, "run_killed_beside", lambda *_: pair)
    assert lockstep.main(["--kills", "20"]) == code
    with pytest.raises(SystemExit, match="143"):  # a second run is not left to itself at SIGTERM
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)


def test_services_do_not_outlive_the_benchmark(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr("subprocess.Popen", lambda command, **_: commands.append(command))
    with Ports() as ports:
        group = killed.Services("cartpole", tmp_path / "run", (), 1, ports)
        for name in group.names:
            group.start(name)
    assert [command[: len(wrapper())] for command in commands] == [wrapper()] * 2


def test_a_resume_ends_with_its_services_at_sigterm(monkeypatch):
    monkeypatch.setattr(resume, "measured", lambda _: ())
    assert resume.main(["--seeds", "1"]) == 0
    with pytest.raises(SystemExit, match="143"):
        signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None)


def test_the_load_ends_with_the_runs():
    """The next benchmark finds an idle machine."""
    with loaded():
        assert multiprocessing.active_children()
    assert not multiprocessing.active_children()
