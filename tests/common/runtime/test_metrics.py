"""Declaring metrics, and accounting for time."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.runtime.metrics import UNKNOWN, Phases, ServiceMetrics, advance, kinds
from common.wire.messages import Hello, SnapshotWanted

pytestmark = pytest.mark.service


class Metrics(ServiceMetrics):
    """A small service."""

    def __init__(self, clock=lambda: 0.0):
        super().__init__("test")
        self.eggs = self._counter("eggs", "Eggs laid.")
        self.lost = self._counters("eggs_lost", "Eggs lost.", label="reason", values=("fox", "rain"))
        self.weight = self._gauge("weight_grams", "Mean weight.", initial=UNKNOWN)
        self.nests = self._gauges("nests", "Nests.", label="state", values=("full", "empty"))
        self.scores = self._open_gauge("score", "Scores.", label="name")
        self.age = self._histogram("age_days", "Age.", buckets=(1, 2))
        self.phases = self._phases("sit", "fly", clock=clock)


def samples(metrics):
    """{(name, label values): value} of a scrape."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_scrape_shows_what_is_counted_elsewhere_as_of_now():
    """The loop counts for itself; nobody copies its counters while nobody looks."""
    metrics, loop = Metrics(), Counter()
    assert samples(metrics)["rookery_test_eggs_total",] == 0
    metrics.on_scrape = lambda: advance(metrics.eggs, loop["eggs"])
    loop["eggs"] = 3
    assert samples(metrics)["rookery_test_eggs_total",] == 3


def test_every_value_of_a_closed_label_is_there_before_anything_happened():
    """An alert on the rate of drops must not miss the first drop for want of a zero before it."""
    read = samples(Metrics())
    assert read["rookery_test_eggs_lost_total", "fox"] == 0
    assert read["rookery_test_eggs_lost_total", "rain"] == 0
    assert read["rookery_test_nests", "full"] == 0
    assert read["rookery_test_phase_seconds_total", "fly"] == 0


def test_a_value_outside_a_closed_label_is_an_error_not_a_series():
    """A typo, or a reason made up by a hostile peer, must not grow the series."""
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.lost["cat"].inc()
    with pytest.raises(KeyError):
        metrics.phases.enter("swim")


def test_a_gauge_that_means_nothing_yet_is_nan():
    """A mean return of 0 before the first episode would be a good Pong score."""
    value = samples(Metrics())["rookery_test_weight_grams",]
    assert value != value  # noqa: PLR0124  NaN


def test_creation_times_are_not_exposed():
    """They would double the series of each counter."""
    assert b"_created" not in Metrics().render()


def test_two_services_in_one_process_do_not_meet():
    """The service tests run a learner and actors in one process."""
    one, other = Metrics(), Metrics()
    one.eggs.inc(3)
    assert samples(one)["rookery_test_eggs_total",] == 3
    assert samples(other)["rookery_test_eggs_total",] == 0


def test_build_info_names_the_software_and_the_protocol():
    """A dashboard shows which versions run side by side during an upgrade."""
    (line,) = [line for line in Metrics().render().decode().splitlines() if line.startswith("rookery_build_info{")]
    assert 'service="test"' in line
    assert 'protocol="1"' in line


def test_the_declarations_list_what_a_scrape_shows():
    """The docs test trusts `declared`; this holds it to what the registry really exposes."""
    metrics = Metrics()
    metrics.scores.labels("x").set(1)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode()) if f.name.startswith("rookery_")}
    assert {d.name.removesuffix("_total"): d.type for d in metrics.declared} == {name: f.type for name, f in families.items()}
    for declared in metrics.declared:
        family = families[declared.name.removesuffix("_total")]
        assert family.documentation == declared.help
        assert {label for s in family.samples for label in s.labels} - {"le"} == set(declared.labels)


def test_advance_follows_a_total_kept_elsewhere_and_never_goes_back():
    """The ledger's totals, after a resume too, become counters; a smaller reading is not a reset."""
    metrics = Metrics()
    for total in (5, 5, 9, 2):
        advance(metrics.eggs, total)
    advance(metrics.lost["fox"], 4)
    assert samples(metrics)["rookery_test_eggs_total",] == 9
    assert samples(metrics)["rookery_test_eggs_lost_total", "fox"] == 4


def test_kinds_are_the_tags_of_messages():
    """The `kind` label says what the wire says."""
    assert kinds(Hello, SnapshotWanted) == ("hello", "snapshot_wanted")


def test_each_second_belongs_to_exactly_one_phase(clock):
    """The shares of the live view are made of these."""
    phases = Phases(("env", "act", "wait"), clock=clock, help_text="")
    for phase, seconds in (("env", 2.0), ("act", 0.5), ("env", 1.0), ("wait", 4.0)):
        phases.enter(phase)
        clock.now += seconds
    assert phases.seconds() == {"env": 3.0, "act": 0.5, "wait": 4.0}
    assert sum(phases.seconds().values()) == clock.now - 100.0


def test_time_before_the_first_phase_is_nobodys(clock):
    """Importing torch is not a phase of the loop."""
    phases = Phases(("env",), clock=clock, help_text="")
    clock.now += 7.0
    assert phases.seconds() == {"env": 0.0}
    phases.enter("env")
    clock.now += 1.0
    assert phases.seconds() == {"env": 1.0}


def test_a_phase_that_interrupts_gives_back_to_the_one_before(clock):
    """A checkpoint in the middle of the wait, and one that fails."""
    phases = Phases(("wait", "checkpoint"), clock=clock, help_text="")
    phases.enter("wait")
    clock.now += 1.0
    with suppress(OSError), phases.during("checkpoint"):
        clock.now += 2.0
        raise OSError("full")
    clock.now += 4.0
    assert phases.seconds() == {"wait": 5.0, "checkpoint": 2.0}


def test_a_loop_that_has_ended_spends_no_more_time(clock):
    """A service that lingers after its run must not look as if it waited for credit."""
    phases = Phases(("wait",), clock=clock, help_text="")
    phases.enter("wait")
    clock.now += 2.0
    phases.stop()
    clock.now += 100.0
    assert phases.seconds() == {"wait": 2.0}


def test_a_phase_of_an_unknown_name_changes_nothing(clock):
    """The mistake must show as itself, not as time counted twice."""
    phases = Phases(("env",), clock=clock, help_text="")
    phases.enter("env")
    clock.now += 1.0
    with pytest.raises(KeyError):
        phases.enter("fly")
    assert phases.seconds() == {"env": 1.0}


def test_a_scrape_shows_the_phase_that_hangs(clock):
    """A loop stuck in the environment must not look as if time stood still."""
    metrics = Metrics(clock)
    metrics.phases.enter("sit")
    clock.now += 30.0
    assert samples(metrics)["rookery_test_phase_seconds_total", "sit"] == 30.0


def test_scrapes_during_updates_lose_nothing_and_never_run_backwards():
    """Prometheus scrapes while the loop counts and switches phases thousands of times a second."""
    ticks = iter(range(10**9))
    metrics = Metrics(lambda: float(next(ticks)))
    done = threading.Event()

    def loop():
        for number in range(3000):
            metrics.phases.enter(("sit", "fly")[number % 2])
            metrics.eggs.inc()
            metrics.lost["fox"].inc(2)
        done.set()

    thread = threading.Thread(target=loop)
    thread.start()
    seen = [0.0]
    while not done.is_set():
        seen.append(sum(metrics.phases.seconds().values()))
        metrics.render()
    thread.join()
    assert seen == sorted(seen)
    assert samples(metrics)["rookery_test_eggs_total",] == 3000
    assert samples(metrics)["rookery_test_eggs_lost_total", "fox"] == 6000


def meanwhile(call):
    """Let another thread `call` now, as far as it gets before it has to wait for this one."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(0.05)
    return thread


def test_a_scrape_in_the_middle_of_a_switch_counts_no_second_twice(clock):
    """The booked phase and the running one are two facts; a scrape may come between them."""
    phases, seen, readers = Phases(("env", "act"), clock=clock, help_text=""), [], []

    class Books(dict):
        """Tells when a phase has just been booked."""

        def __setitem__(self, phase, seconds):
            super().__setitem__(phase, seconds)
            readers.append(meanwhile(lambda: seen.append(sum(phases.seconds().values()))))

    phases._seconds = Books(phases._seconds)
    phases.enter("env")
    clock.now += 5.0
    phases.enter("act")
    for reader in readers:
        reader.join()
    assert seen == [5.0]


def test_scrapes_side_by_side_advance_a_counter_once():
    """Prometheus and a person with curl bring the same total over at the same time."""
    metrics, others = Metrics(), []

    class Watched:
        """The counter, and a second scrape at the moment when the first has read it."""

        inc = metrics.eggs.inc

        def collect(self):
            read = metrics.eggs.collect()
            others.append(meanwhile(lambda: advance(metrics.eggs, 10)))
            return read

    advance(Watched(), 10)
    for other in others:
        other.join()
    assert samples(metrics)["rookery_test_eggs_total",] == 10
