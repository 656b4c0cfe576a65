"""`rookery doctor` around its diagnosis: how long it measures, what it prints, with which code it ends."""

import io

import pytest

from common.errors import ConfigError
from common.observability.deployment import ServiceSample
from services.cli.inspect.doctor import doctor

pytestmark = pytest.mark.pure


class Fake:
    """A source that gives two moments, and keeps_history when it was asked."""

    title, window = "runs/mine", 10.0

    def __init__(self, before, after, *, keeps_history=False):
        """The moments."""
        self.moments, self.keeps_history, self.asked = [before, after], keeps_history, []

    def read(self, ago=0.0):
        """The next moment."""
        self.asked.append(ago)
        return self.moments.pop(0)


def learner(at, wait, train, *, ranks=1.0, run="r1", updates=None, **changes):
    """A learner after so many seconds of each."""
    values = {("phase_seconds_total", "wait"): wait, ("phase_seconds_total", "train"): train, ("ranks", ""): ranks}
    values |= {
        ("training", ""): 1.0,
        ("policy_version", ""): 3.0,
        ("workers_connected", "actor"): 0.0,
        ("updates_total", ""): train if updates is None else updates,
    }
    samples = {(f"rookery_learner_{name}", label): value for (name, label), value in values.items()}
    samples |= {("rookery_run_info", run): 1.0} if run else {}
    return ServiceSample(at=at, role="learner", samples=samples, **changes)


def actor(at):
    """An actor that steps."""
    samples = {("rookery_actor_policy_version", ""): 3.0, ("rookery_actor_env_steps_total", ""): 100.0 * at}
    return ServiceSample(at=at, role="actor", samples=samples)


HEALTHY = {"learner": learner(0.0, 0.0, 0.0)}, {"learner": learner(10.0, 0.5, 9.5)}
WAITING = {"learner": learner(0.0, 0.0, 0.0)}, {"learner": learner(10.0, 9.0, 1.0)}


def run(source, seconds=None):
    """Exit code, words, and how long it slept."""
    out, slept = io.StringIO(), []
    code = doctor(source, seconds=seconds, stdout=out, sleep=slept.append)
    return code, out.getvalue(), slept


def test_the_report_says_of_how_many_ranks_its_sums_are():
    moments = ({"learner": learner(at, at / 20, at, ranks=2.0)} for at in (0.0, 10.0))
    code, said, _ = run(Fake(*moments))
    assert code == 0
    assert "1 of 2 ranks answer: sums are of these\n" in said


def test_a_bottleneck_alone_is_healthy():
    """A pipeline may check a run by the exit code."""
    code, words, slept = run(Fake(*HEALTHY))
    assert (code, slept) == (0, [10.0])
    assert words.splitlines() == [
        "runs/mine: learner, over 10 s",
        "",
        "learner-bound: the learner trains 95 % of the time; use a smaller network, fewer gradient steps per env step, or a GPU",
        "  learner  train 95 %, wait 5 %",
        "",
        "nothing is broken",
    ]


def test_a_bottleneck_is_no_fault_and_has_a_line():
    """The reader sees the bottleneck, what there is to gain, and that nothing is broken."""
    code, words, slept = run(Fake(*WAITING), seconds=3.0)
    assert (code, slept) == (0, [3.0])
    assert "nothing is broken" in words
    assert "gain     at most 10.0 times as fast" in words
    assert words.splitlines()[-1].startswith("LearnerWaiting: the learner waits 90 % of its time")


@pytest.mark.parametrize(("updates", "noted"), [(0.0, True), (1.0, True), (2.0, False)])
def test_a_window_shorter_than_a_cycle_of_an_update_is_noted(updates, noted):
    """The shares depend on the moment: the learner waits for 12 s and trains for 24 s."""
    code, words, _ = run(Fake({"learner": learner(0.0, 0.0, 0.0)}, {"learner": learner(10.0, 2.0, 8.0, updates=updates)}))
    line = f"  updates within this time: {updates:.0f}; the shares are of a part of an update; raise --seconds"
    assert code == 0
    assert (line in words.splitlines()) is noted


def test_a_source_that_keeps_history_is_not_waited_for():
    """A Prometheus has the last minute already."""
    source = Fake(*HEALTHY, keeps_history=True)
    assert run(source, seconds=60.0)[2] == []
    assert source.asked == [60.0, 0.0]


@pytest.mark.parametrize(
    "moment",
    [
        {"a": ServiceSample(at=0.0, role="actor")},
        {"a": learner(0.0, 0.0, 0.0), "b": learner(0.0, 0.0, 0.0)},
        {"a": learner(0.0, 0.0, 0.0, ranks=2.0), "b": learner(0.0, 0.0, 0.0, ranks=2.0, run="r2")},
        {"a": learner(0.0, 0.0, 0.0, ranks=2.0), "b": learner(0.0, 0.0, 0.0, ranks=2.0), "c": learner(0.0, 0.0, 0.0, run="")},
        {name: learner(0.0, 0.0, 0.0, ranks=2.0, run=run) for name, run in (("a", "r1"), ("b", "r1"), ("c", ""))},
    ],
)
def test_a_diagnosis_is_of_one_learner(moment):
    """An actor alone does not know the run, and two runs are two diagnoses, also where one of them has ranks."""
    with pytest.raises(ConfigError, match="a diagnosis is of one learner: found"):
        run(Fake(moment, moment))


def test_a_killed_learner_ends_with_1_though_an_address_does_not_name_its_role():
    """It was dead before the first scrape."""
    silent = {"10.0.0.7:9100": ServiceSample(at=0.0, unreachable="connection refused")}
    code, words, _ = run(Fake(silent | {"10.0.0.8:9100": actor(0.0)}, silent | {"10.0.0.8:9100": actor(10.0)}))
    assert code == 1
    assert "unknown: the learner is unreachable (connection refused)" in words
    assert "LearnerDown: learner 10.0.0.7:9100 does not answer: connection refused; see its log" in words
    assert words.endswith("10.0.0.7:9100 was taken for the learner: it does not answer, and no other service is one\n")


def test_where_no_rank_of_the_learner_answers_each_silent_service_is_named():
    """The ranks end together. An address does not name their roles."""
    silent = {f"10.0.0.{n}:9100": ServiceSample(at=0.0, unreachable="connection refused") for n in (6, 7)}
    code, words, _ = run(Fake(silent | {"10.0.0.8:9100": actor(0.0)}, silent | {"10.0.0.8:9100": actor(10.0)}))
    assert code == 1
    assert words == (
        "runs/mine: no learner answers, and no answer came from 10.0.0.6:9100 (connection refused), 10.0.0.7:9100 "
        "(connection refused); see their logs\n"
    )


def test_ranks_that_are_all_down_are_one_learner_that_is_down():
    """A run directory names their roles."""
    down = {name: ServiceSample(at=0.0, role="learner", unreachable="connection refused") for name in ("learner", "learner-1")}
    code, words, _ = run(Fake(down | {"a": actor(0.0)}, down | {"a": actor(10.0)}))
    assert code == 1
    assert "LearnerDown: learner does not answer: connection refused" in words
    assert "taken for" not in words


def test_no_time_gives_no_diagnosis():
    """A Prometheus that scrapes once a minute has one sample for both ends of a second."""
    moment = {"learner": learner(5.0, 9.0, 1.0), "a": actor(5.0)}
    with pytest.raises(ConfigError, match=r"nothing was measured: found two scrapes of one moment.*several scrape intervals"):
        run(Fake(moment, moment, keeps_history=True), seconds=1.0)
