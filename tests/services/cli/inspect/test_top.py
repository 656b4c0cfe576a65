"""The table of a deployment: what each row says, and how it is shown on a terminal and in a pipe."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from common.errors import ResourceError
from common.observability.deployment import ServiceSample, compare
from services.cli.inspect import top as top_module
from services.cli.inspect.top import COLUMNS, head, row, screen, silent, top

pytestmark = pytest.mark.pure

MIB = 2**20


def sample(role, at, unreachable="", unhealthy="", **samples):
    """`name=value`, or `name={label: value}`."""
    found = {}
    for name, value in samples.items():
        full = name if name.startswith("process_") else f"rookery_{role}_{name}"
        for label, number in (value if isinstance(value, dict) else {"": value}).items():
            found[full, label] = float(number)
    return ServiceSample(at=at, role=role, samples=found, unreachable=unreachable, unhealthy=unhealthy)


LEARNER = {"policy_version": 20, "training": 1, "workers_connected": {"actor": 1}, "episode_return_mean": 327.94}
BEFORE = {
    "learner": sample(
        "learner", 0.0, **LEARNER, env_steps_trained_total=0, env_frames_trained_total=0,
        phase_seconds_total={"wait": 0, "train": 0}, policy_lag_versions_sum=0, policy_lag_versions_count=0,
        process_cpu_seconds_total=0, env_steps_dropped_total={"stale": 0},
    ),
    "actor-0": sample(
        "actor", 0.0, policy_version=17, env_steps_total=0, env_frames_total=0, phase_seconds_total={"env": 0, "act": 0}
    ),
    "actor-1": sample("actor", 0.0, policy_version=17),
}  # fmt: skip
AFTER = {
    "learner": sample(
        "learner", 10.0, **LEARNER, env_steps_trained_total=5000, env_frames_trained_total=20_000,
        phase_seconds_total={"wait": 1, "train": 9}, policy_lag_versions_sum=15, policy_lag_versions_count=10,
        process_cpu_seconds_total=9.5, process_resident_memory_bytes=400 * MIB, env_steps_dropped_total={"stale": 120},
        queue_depth=1, queue_capacity=4, ledger_env_steps={"trained": 51_964}, env_frames_per_second=2_100,
    ),
    "actor-0": sample(
        "actor", 10.0, policy_version=18, env_steps_total=6000, env_frames_total=24_000, connected=1,
        phase_seconds_total={"env": 7, "act": 3}, queue_depth=2, queue_capacity=2, process_resident_memory_bytes=300 * MIB,
    ),
    "actor-1": sample("actor", 10.0, unreachable="connection refused"),
}  # fmt: skip
DEPLOYMENT = compare(BEFORE, AFTER)
TWO_RUNS = {name: replace(AFTER["learner"], samples={("rookery_run_info", name): 1.0}) for name in ("a", "b")}
STARTING = sample("learner", 0.0, ranks=1)  # does not know its run yet
ONE_STARTS = {"a": replace(STARTING, samples={**STARTING.samples, ("rookery_run_info", "a"): 1.0}), "b": STARTING}


def cells(name, fleet=DEPLOYMENT):
    """Column -> cell of one row."""
    (service,) = [service for service in fleet.services if service.name == name]
    return dict(zip(COLUMNS, row(service, fleet), strict=False))


def test_the_learners_row_shows_what_it_trains_on():
    """Rates of the window, not of the run."""
    assert cells("learner") == {
        "service": "learner", "state": "training", "env steps/s": "500", "frames/s": "2,000", "busiest": "train 90 %",
        "queue": "1/4", "version": "20", "lag": "1.5", "drops/s": "12", "memory": "400 MiB", "CPU": "95 %",
    }  # fmt: skip


def test_an_actors_row_shows_its_rates_and_its_policy():
    """Its lag is how far its policy is behind the learner's now."""
    assert cells("actor-0") == {
        "service": "actor-0", "state": "connected", "env steps/s": "600", "frames/s": "2,400", "busiest": "env 70 %",
        "queue": "2/2", "version": "18", "lag": "2", "drops/s": "0", "memory": "300 MiB", "CPU": "0 %",
    }  # fmt: skip


def test_a_worker_without_a_policy_has_neither_version_nor_lag():
    shown = cells("actor-0", compare(BEFORE, AFTER | {"actor-0": sample("actor", 10.0, policy_version=-1)}))
    assert (shown["version"], shown["lag"]) == ("-", "-")


def test_a_worker_that_answers_after_the_learner_is_no_version_ahead():
    """The learner published version 21 between the two answers."""
    assert cells("actor-0", compare(BEFORE, AFTER | {"actor-0": sample("actor", 10.0, policy_version=21)}))["lag"] == "0"


def test_a_service_that_does_not_answer_is_unreachable_and_the_reason_is_below_the_table():
    """A missing service is what the user looks for."""
    assert cells("actor-1") == {"service": "actor-1", "state": "unreachable"}
    assert list(silent(DEPLOYMENT)) == ["actor-1 does not answer: connection refused"]


def test_the_head_adds_up_the_ranks_of_a_learner():
    """Each has a row of its own. The second rank trains on half as much, and its actor is the second of the run."""
    totals = {"env_steps_trained_total": 2500, "env_frames_trained_total": 10_000, "ledger_env_steps": {"trained": 1_000}}
    ends = []
    for at, scrape, trained in ((0.0, BEFORE, {}), (10.0, AFTER, totals)):
        first = sample("learner", at, ranks=2)
        first.samples.update(scrape["learner"].samples)
        other = sample("learner", at, **LEARNER, **{"env_frames_trained_total": 0} | trained)
        ends.append({"learner": first, "learner-1": other})
    run = compare(*ends)
    text = "\n".join(head(run))
    assert "52,964 env steps" in text
    assert "2,100 frames/s   connected actors 2" in text  # each rank exports the rate of all
    assert cells("learner-1", run)["frames/s"] == "1,000"


def test_the_head_says_of_how_many_ranks_its_sums_are():
    before, after = ({"learner": sample("learner", at, **LEARNER, ranks=2)} for at in (0.0, 10.0))
    assert "1 of 2 ranks answer: sums are of these" in head(compare(before, after))
    before["learner-1"], after["learner-1"] = before["learner"], after["learner"]
    assert not any("ranks answer" in line for line in head(compare(before, after)))


def test_a_killed_learner_is_unreachable():
    """The head has the reason, so that it is not shown twice."""
    run = compare(BEFORE, AFTER | {"learner": sample("learner", 10.0, unreachable="connection refused")})
    assert cells("learner", run) == {"service": "learner", "state": "unreachable"}
    assert list(head(run)) == ["the learner does not answer: connection refused"]
    assert not [line for line in silent(run) if line.startswith("learner")]


def test_a_service_that_was_not_there_before_has_no_rates():
    """One sample is of no time: 0 env steps per second would be a claim."""
    run = compare({}, {"actor-0": AFTER["actor-0"]})
    assert {name: cells("actor-0", run)[name] for name in ("state", "env steps/s", "frames/s", "drops/s", "CPU")} == {
        "state": "connected", "env steps/s": "-", "frames/s": "-", "drops/s": "-", "CPU": "-",
    }  # fmt: skip


def test_a_learner_that_was_resumed_in_between_has_no_rates_of_its_run():
    """Its counters begin where its checkpoint was: the whole of them is no growth of ten seconds."""
    before, after = (replace(one["learner"], samples=dict(one["learner"].samples)) for one in (BEFORE, AFTER))
    before.samples["rookery_learner_env_steps_dropped_total", "stale"] = 90_400.0
    after.samples["rookery_learner_env_steps_dropped_total", "stale"] = 90_000.0
    for moment, one in ((1.0, before), (7.0, after)):
        one.samples["process_start_time_seconds", ""] = moment
    run = compare({"learner": before}, {"learner": after})
    shown = cells("learner", run)
    assert {name: shown[name] for name in ("env steps/s", "frames/s", "drops/s")} == dict.fromkeys(
        ("env steps/s", "frames/s", "drops/s"), "-"
    )


def test_the_head_has_the_rate_from_update_to_update_that_the_learner_measures():
    """Within two seconds of a learner whose updates take three, its counter stands still or jumps."""
    run = compare({"learner": AFTER["learner"]}, {"learner": replace(AFTER["learner"], at=12.0)})
    assert cells("learner", run)["frames/s"] == "0"
    assert "   2,100 frames/s   " in next(iter(head(run)))
    assert "   - frames/s   " in next(iter(head(compare(BEFORE, BEFORE))))  # of another release


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (150, list(COLUMNS)),
        (82, ["service", "state", "env steps/s", "frames/s", "busiest", "queue", "lag", "memory", "CPU"]),
        (60, ["service", "state", "env steps/s", "busiest", "lag", "CPU"]),
        (34, ["service", "state", "env steps/s"]),
    ],
)
def test_a_narrow_terminal_has_fewer_columns_and_whole_rows(width, columns):
    """Each service keeps one line, and no cell is cut."""
    console = Console(width=width, file=io.StringIO())
    console.print(screen("runs/mine", DEPLOYMENT, width=width))
    table = [line for line in console.file.getvalue().splitlines() if line.startswith(("service", "learner ", "actor-0"))]
    assert table[0].split() == " ".join(columns).split()
    assert len(table) == 3
    assert not [line for line in table if "…" in line]


@pytest.mark.parametrize(
    ("role", "changes", "state"),
    [
        ("actor", {"connected": 0}, "no learner"),
        ("env_worker", {"connected": 0}, "no policy server"),
        ("learner", {"training": 0}, "not training"),
        ("actor", {"connected": 1, "unhealthy": "loop has not ticked for 20 s"}, "hung"),
    ],
)
def test_the_state_is_one_word(role, changes, state):
    """The first thing to look at."""
    now = {role: sample(role, 1.0, policy_version=0, **changes)}
    assert cells(role, compare(now, now))["state"] == state


def test_the_head_says_how_the_run_is_and_what_holds_it_up():
    """Score, env steps, speed and actors come first."""
    summary, bottleneck = head(DEPLOYMENT)
    assert summary == "mean100 327.9   51,964 env steps   2,100 frames/s   connected actors 1"
    assert bottleneck == "balanced: the learner works 90 % of the time, the actors 100 %"


def learner_head(**changes):
    """The lines above the table, of a learner with these metrics."""
    return list(head(compare({}, {"learner": sample("learner", 10.0, **LEARNER | changes)})))


def test_a_run_with_a_target_shows_the_time_left_that_its_learner_estimates():
    changes = {"ledger_env_steps": {"trained": 50_000}, "env_steps_planned": 500_000, "target_return": 475}
    lines = learner_head(**changes, training=1, time_left_seconds=900)
    assert lines[0].startswith("mean100 327.9, target 475   50,000 of 500,000 env steps   ")
    assert lines[1] == "about 15 min left"
    unknown = {"training": 1, "time_left_seconds": math.nan}, {"training": 0, "time_left_seconds": 900}, {"training": 1}
    assert not [line for known in unknown for line in learner_head(**changes, **known) if "left" in line]


def test_a_mean_of_too_few_episodes_is_marked():
    """100 episodes of all environments, as the target needs them."""
    few = learner_head(episode_return_mean_episodes=3, environments_unfinished=5, target_return=475)[0]
    assert few.startswith("mean100 327.9 (of 3 episodes) (5 environments have ended none), target 475   ")
    assert learner_head(episode_return_mean_episodes=100, environments_unfinished=0)[0].startswith("mean100 327.9   ")
    short = learner_head(episode_return_mean_episodes=100, episodes_before_leaving=63)[0]
    assert short.startswith("mean100 327.9 (63 of them ended before an actor left)   ")


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        ({"actor-0": AFTER["actor-0"]}, "no learner is among these"),
        ({"learner": sample("learner", 1.0, unreachable="timed out")}, "the learner does not answer: timed out"),
        (TWO_RUNS, "several runs are among these"),
        (ONE_STARTS, "several runs are among these"),
    ],
)
def test_without_a_learner_the_head_says_so(moment, words):
    """Actors alone, a learner that is being restarted, or the learners of two runs, whose sums would be of neither."""
    assert next(head(compare(moment, moment))).startswith(words)


class Fake:
    """A source of moments; at their end somebody presses Ctrl-C."""

    title, window = "runs/mine", 10.0

    def __init__(self, *moments, keeps_history=False):
        """The moments, or errors to raise."""
        self.moments, self.keeps_history, self.asked = list(moments), keeps_history, []

    def read(self, ago=0.0):
        """The next one."""
        self.asked.append(ago)
        if not self.moments:
            raise KeyboardInterrupt
        moment = self.moments.pop(0)
        if isinstance(moment, Exception):
            raise moment
        return moment


class Terminal(io.StringIO):
    """Somewhere to draw."""

    def isatty(self):
        """It claims to be one."""
        return True


def shown(source, *, once, stream=None):
    """The printed text, and the pauses."""
    stream, slept = stream or io.StringIO(), []
    assert top(source, once=once, stdout=stream, sleep=slept.append) == 0
    return stream.getvalue(), slept


def test_once_prints_one_table_and_ends():
    """For a script, or a bug report."""
    text, slept = shown(Fake(BEFORE, AFTER), once=True)
    assert slept == [top_module.ONCE_SECONDS]
    lines = text.splitlines()
    assert lines[0] == "runs/mine"
    assert [line.split()[0] for line in lines if line.startswith(("service", "learner ", "actor")) and "not" not in line] == [
        "service", "learner", "actor-0", "actor-1",
    ]  # fmt: skip


def test_the_one_service_that_never_answered_is_the_learner_where_no_other_is():
    moment = {"actor-0": AFTER["actor-0"], "10.0.0.7:9100": sample("", 1.0, unreachable="timed out")}
    assert "the learner does not answer: timed out" in shown(Fake(moment, moment), once=True)[0]


def test_a_pipe_gets_one_table_after_the_other():
    """Without a terminal nothing is redrawn, and no line is folded."""
    text, slept = shown(Fake(BEFORE, AFTER, AFTER), once=False)
    assert slept == [top_module.LINE_PERIOD] * 3
    assert text.count("runs/mine") == 2
    assert "\x1b" not in text
    assert any("actor-0" in line and "300 MiB" in line for line in text.splitlines())


def test_a_terminal_is_redrawn_and_given_back():
    """Ctrl-C is the way to leave: the cursor comes back, and there is no traceback."""
    text, slept = shown(Fake(BEFORE, AFTER), once=False, stream=Terminal())
    assert slept == [top_module.PERIOD] * 2
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_source_that_keeps_history_fills_the_first_table_at_once():
    """A Prometheus is asked for the last minute, not waited for."""
    source = Fake(BEFORE, AFTER, keeps_history=True)
    text, slept = shown(source, once=False)
    assert source.asked[:2] == [10.0, 0.0]
    assert slept[0] == 0.0
    assert "2,000" in text


def test_a_prometheus_that_is_restarted_does_not_end_the_table():
    """One line reports it, and the next scrape is tried."""
    text, _ = shown(Fake(BEFORE, ResourceError("the Prometheus does not answer", found="x"), AFTER), once=False)
    assert "the Prometheus does not answer: found x" in text
    assert "2,000" in text
