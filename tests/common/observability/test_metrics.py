"""Declared metrics, what a scrape shows of them, and the accounting of time."""

from __future__ import annotations

import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.observability.health import Health
from common.observability.metrics import UNKNOWN, CountAndSum, Exporter, Metric, Phases, build_info, kinds, mean
from common.protocol.messages import PROTOCOL_VERSION, Hello, SnapshotWanted

pytestmark = pytest.mark.service

PATIENCE = 120.0  # seconds; only a fault lets it pass


class State:
    """The state of a small service."""

    def __init__(self, clock=lambda: 0.0):
        self.eggs, self.lost, self.weights, self.scores = 0, {"fox": 2, "cat": 9}, {}, {}
        self.age, self.phases = CountAndSum(), Phases(("sit", "fly"), clock=clock)


METRICS = (
    build_info("test"),
    Metric("rookery_test_eggs_total", "Eggs laid.", lambda s: s.eggs),
    Metric("rookery_test_eggs_lost_total", "Eggs lost.", lambda s: s.lost, {"reason": ("fox", "rain")}),
    Metric("rookery_test_weight_grams", "Weight.", lambda s: s.weights, {"nest": ("low",)}, absent=UNKNOWN),
    Metric("rookery_test_score", "Scores.", lambda s: s.scores, {"name": ()}),
    Metric("rookery_test_age_days", "Age.", lambda s: s.age, summary=True),
    Metric("rookery_test_phase_seconds_total", "Seconds.", lambda s: s.phases.seconds(), {"phase": ("sit", "fly")}),
)


def page(state):
    """The text of a scrape."""
    return Exporter(METRICS, lambda: state).render().decode()


def samples(state):
    """{(name, label values): value} of a scrape."""
    families = text_string_to_metric_families(page(state))
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_scrape_shows_the_state_of_its_moment():
    """Nothing is copied while nobody scrapes."""
    state = State()
    exporter = Exporter(METRICS, lambda: state)
    assert "rookery_test_eggs_total 0.0" in exporter.render().decode()
    state.eggs = 3
    assert "rookery_test_eggs_total 3.0" in exporter.render().decode()


def test_a_scrape_shows_that_the_loop_hangs(clock):
    """A Prometheus does not ask /healthz."""
    health = Health(deadline=10.0, clock=clock)
    exporter = Exporter(METRICS, State, health)
    assert "rookery_loop_overdue_seconds 0.0" in exporter.render().decode()
    clock.now += 12.0
    assert "rookery_loop_overdue_seconds 2.0" in exporter.render().decode()


def test_every_value_of_a_closed_label_is_exported_and_no_other():
    """An alert on the rate of drops must not miss the first drop; a reason made up by a hostile worker must add no series."""
    read = samples(State())
    assert {key: value for key, value in read.items() if key[0] == "rookery_test_eggs_lost_total"} == {
        ("rookery_test_eggs_lost_total", "fox"): 2,
        ("rookery_test_eggs_lost_total", "rain"): 0,
    }


def test_a_gauge_that_means_nothing_yet_is_nan():
    """A mean return of 0 before the first episode would be a good Pong score."""
    value = samples(State())["rookery_test_weight_grams", "low"]
    assert value != value  # noqa: PLR0124  NaN
    assert mean([]) != mean([])
    assert mean([1.0, 2.0]) == 1.5


def test_an_open_label_has_the_values_of_the_state():
    """An algorithm chooses the names of its scalars."""
    state = State()
    state.scores = {"loss": 0.5}
    assert samples(state)["rookery_test_score", "loss"] == 0.5


def test_a_summary_has_the_number_of_observations_and_their_sum():
    """The mean over any time is the growth of one divided by that of the other."""
    state = State()
    for value in (0, 1, 2, 3):
        state.age.observe(value)
    read = samples(state)
    assert (read["rookery_test_age_days_count",], read["rookery_test_age_days_sum",]) == (4, 6)


def test_creation_times_are_not_exported():
    """They would double the series of each counter."""
    assert "_created" not in page(State())


def test_build_info_names_the_software_and_the_protocol():
    """A dashboard shows which versions run side by side during an upgrade."""
    (line,) = [line for line in page(State()).splitlines() if line.startswith("rookery_build_info{")]
    assert 'service="test"' in line
    assert f'protocol="{PROTOCOL_VERSION}"' in line


def test_a_scrape_has_the_declared_name_type_and_help():
    """The page of the metrics is generated from the declarations."""
    state = State()
    state.scores = {"loss": 0.5}
    families = {f.name: f for f in text_string_to_metric_families(page(state)) if f.name.startswith("rookery_")}
    assert {m.name.removesuffix("_total"): (m.type, m.help) for m in METRICS} == {
        name: (f.type, f.documentation) for name, f in families.items()
    }


def test_kinds_are_the_tags_of_messages():
    """The `kind` label says what the wire says."""
    assert kinds(Hello, SnapshotWanted) == ("hello", "snapshot_wanted")


def test_each_second_belongs_to_exactly_one_phase(clock):
    """The shares of the live view are made of these."""
    phases = Phases(("env", "act", "wait"), clock=clock)
    for phase, seconds in (("env", 2.0), ("act", 0.5), ("env", 1.0), ("wait", 4.0)):
        phases.enter(phase)
        clock.now += seconds
    assert phases.seconds() == {"env": 3.0, "act": 0.5, "wait": 4.0}
    assert sum(phases.seconds().values()) == clock.now - 100.0


def test_time_before_the_first_phase_is_nobodys(clock):
    """Importing torch is not a phase of the loop."""
    phases = Phases(("env",), clock=clock)
    clock.now += 7.0
    assert phases.seconds() == {"env": 0.0}
    phases.enter("env")
    clock.now += 1.0
    assert phases.seconds() == {"env": 1.0}


def test_a_loop_that_has_ended_spends_no_more_time(clock):
    """A service that lingers after its run must not look as if it waited for credit."""
    phases = Phases(("wait",), clock=clock)
    phases.enter("wait")
    clock.now += 2.0
    phases.stop()
    clock.now += 100.0
    assert phases.seconds() == {"wait": 2.0}


def test_a_phase_of_an_unknown_name_changes_nothing(clock):
    """The mistake must show as itself, not as time counted twice."""
    phases = Phases(("env",), clock=clock)
    phases.enter("env")
    clock.now += 1.0
    with pytest.raises(KeyError):
        phases.enter("fly")
    assert phases.seconds() == {"env": 1.0}


def test_scrapes_during_updates_lose_nothing_and_never_run_backwards():
    """Prometheus scrapes while the loop counts and switches phases thousands of times a second."""
    ticks = iter(range(10**9))
    state = State(lambda: float(next(ticks)))
    exporter, done = Exporter(METRICS, lambda: state), threading.Event()

    def loop():
        for number in range(3000):
            state.phases.enter(("sit", "fly")[number % 2])
            state.eggs += 1
            state.age.observe(number % 4)
        done.set()

    thread = threading.Thread(target=loop)
    thread.start()
    seen = [0.0]
    while not done.is_set():
        seen.append(sum(state.phases.seconds().values()))
        exporter.render()
    thread.join()
    assert seen == sorted(seen)
    read = samples(state)
    assert read["rookery_test_eggs_total",] == 3000
    assert (read["rookery_test_age_days_count",], read["rookery_test_age_days_sum",]) == (3000, 4500)


def test_a_scrape_in_the_middle_of_a_switch_counts_no_second_twice(clock):
    """The booked phase and the running one are two facts; a scrape may come between them."""
    phases, seen, readers, halted = Phases(("env", "act"), clock=clock), [], [], threading.Event()

    class AnnouncedLock:
        """A lock that announces a thread which has to wait for it."""

        def __init__(self):
            self.lock = threading.Lock()

        def __enter__(self):
            if not self.lock.acquire(blocking=False):
                halted.set()
                self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    def scrape():
        seen.append(sum(phases.seconds().values()))
        halted.set()

    class Books(dict):
        """Lets a scrape begin when a phase has just been booked, and go on as far as it gets."""

        def __setitem__(self, phase, seconds):
            super().__setitem__(phase, seconds)
            readers.append(threading.Thread(target=scrape))
            readers[-1].start()
            assert halted.wait(PATIENCE)

    phases._lock, phases._seconds = AnnouncedLock(), Books(phases._seconds)
    phases.enter("env")
    clock.now += 5.0
    phases.enter("act")
    for reader in readers:
        reader.join()
    assert seen == [5.0]


def test_the_cpu_time_of_the_loop_belongs_to_the_phase_that_used_it(clock):
    """A phase of four seconds in which the thread ran for one of them."""
    cpu = [50.0]
    phases = Phases(("env", "act"), clock=clock, cpu_clock=lambda: lambda: cpu[0])
    for phase, seconds, used in (("env", 2.0, 0.5), ("act", 4.0, 1.0), ("env", 1.0, 1.0)):
        phases.enter(phase)
        clock.now += seconds
        cpu[0] += used
    assert (phases.cpu_seconds(["env"]), phases.cpu_seconds(["act"]), phases.cpu_seconds(["env", "act"])) == (1.5, 1.0, 2.5)
    phases.stop()
    cpu[0] += 10.0
    assert phases.cpu_seconds(["env", "act"]) == 2.5


def test_a_scrape_reads_the_cpu_time_of_the_loop_and_not_its_own():
    """The thread that scrapes works, while that of the loop waits."""
    phases, entered, done, own = Phases(("wait",)), threading.Event(), threading.Event(), []

    def loop():
        began = time.thread_time()
        phases.enter("wait")
        entered.set()
        done.wait()
        own.append(time.thread_time() - began)

    thread = threading.Thread(target=loop)
    thread.start()
    entered.wait()
    began = time.thread_time()
    while time.thread_time() - began < 0.1:
        pass
    used = phases.cpu_seconds(["wait"])
    done.set()
    thread.join()
    assert used <= own[0]
