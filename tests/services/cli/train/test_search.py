"""The search for the number of actors, on simulated runs of known speed."""

from __future__ import annotations

import pytest

from services.cli.train.search import CONNECT_TIMEOUT, LONGEST_WINDOW, SETTLE, ActorSearch
from services.cli.train.status import RunStatus

pytestmark = pytest.mark.pure


def searched(speed, *, max_actors=64, batch=1, arrives=lambda wanted: wanted, seconds=2_000):
    """Run a search, one observation per second of `speed(actors)` env steps in whole batches; return it and its duration."""
    search, trained = ActorSearch(max_actors=max_actors), 0.0
    for second in range(seconds):
        here = arrives(search.actors)
        trained += speed(here)
        seen = int(trained // batch) * batch
        search.observe(RunStatus(env_steps=seen, workers={"actor": here}), float(second))
        if search.done:
            return search, second
    return search, None


@pytest.mark.parametrize(
    ("speed", "best"),
    [
        (lambda n: min(n * 300, 1000), 4),  # four saturate the learner
        (lambda _: 500, 1),  # one feeds it
        (lambda n: [0, 900, 1500, 1490, 1300, 1100][min(n, 5)], 2),  # more than two fight for the cores
        (lambda n: n * 100, 28),  # no end in sight: as many as may be tried (1, 2, 3, 4, 6, 9, 13, 19, 28)
    ],
)
def test_the_fewest_actors_that_are_as_fast_as_the_fastest_are_found(speed, best):
    """As a sweep by hand finds it."""
    search, ended = searched(speed, max_actors=28)
    assert (search.done, search.actors) == (True, best)
    assert search.rates[best] >= 0.97 * max(search.rates.values())
    assert ended is not None


def test_batches_that_arrive_seconds_apart_hide_no_gain_that_counts():
    """2,048 env steps at a time: two readings could err by a sixth of what arrives in the window."""
    speed = [0, 1000, 1500, 1510, 1490]
    search, _ = searched(lambda n: speed[n], max_actors=4, batch=2048)
    assert search.rates == {n: pytest.approx(speed[n], rel=0.06) for n in (1, 2, 3, 4)}
    assert speed[search.actors] >= 0.9 * max(speed)


def test_what_was_close_is_looked_at_again():
    """The machine was slow while two were tried: at a second look they are as fast as three."""
    looks = iter([500, 850, 1000, 990, 1010, 1150])  # of 1, 2, 3, 4 actors; then 3 and 2 again
    speeds = {}
    search = ActorSearch(max_actors=4)
    trained, actors, current = 0.0, 0, 0.0
    for second in range(2_000):
        if search.actors != actors:
            actors, current = search.actors, next(looks)
            speeds.setdefault(actors, []).append(current)
        trained += current
        search.observe(RunStatus(env_steps=int(trained), workers={"actor": actors}), float(second))
        if search.done:
            break
    assert speeds == {1: [500], 2: [850, 1150], 3: [1000, 1010], 4: [990]}
    assert search.rates == {1: pytest.approx(500), 2: pytest.approx(1000), 3: pytest.approx(1005), 4: pytest.approx(990)}
    assert search.actors == 2


@pytest.mark.parametrize("resumed_at", [0, 10])  # with the run, or amid the first measurement, between two statuses
def test_the_refill_of_an_empty_replay_memory_is_not_measured(resumed_at):
    """Without gradient steps each actor sends 1,500 env steps/s; with them, all together at most 1,000."""
    search, trained = ActorSearch(max_actors=8), 300_000
    for second in range(1_000):
        refills = 0 <= second - resumed_at < 100
        trained += 1_500 * search.actors if refills else min(400 * search.actors, 1_000)
        training = {"samples_per_insert": 0.0 if refills else 256.0}
        search.observe(RunStatus(env_steps=trained, training=training, workers={"actor": search.actors}), float(second))
    assert (search.done, search.actors) == (True, 3)
    assert search.rates[1] == pytest.approx(400)


def test_a_learner_that_falls_back_to_its_checkpoint_begins_the_window_anew():
    """Killed and resumed in the middle of a measurement: the loss is no slowness."""
    search = ActorSearch(max_actors=1)
    trained = [*range(0, 1000, 100), *range(0, 5000, 100)]
    for second, env_steps in enumerate(trained):
        search.observe(RunStatus(env_steps=env_steps + 1, workers={"actor": 1}), float(second))
    assert search.rates == {1: pytest.approx(100)}


def test_a_window_with_few_updates_is_widened_and_ends():
    """One update in twenty seconds: the rate is right after three of them, and the search goes no further than its deadline."""
    search, ended = searched(lambda _: 100, max_actors=1, batch=2000)
    assert search.rates[1] == pytest.approx(100, rel=0.1)
    assert ended <= CONNECT_TIMEOUT + SETTLE + LONGEST_WINDOW + 20


@pytest.mark.parametrize("seconds", [40, 120])  # between two updates with one actor
def test_a_measurement_goes_on_until_two_updates_were_seen(seconds):
    search, _ = searched(lambda n: 1_000 * n, max_actors=4, batch=1_000 * seconds)
    assert search.rates == {n: pytest.approx(1_000 * n, rel=0.1) for n in (1, 2, 3, 4)}
    assert search.actors == 4


@pytest.mark.parametrize("known", [{}, {1: 100.0}])
def test_a_number_with_which_updates_take_too_long_has_no_rate(known):
    search = ActorSearch(max_actors=8, actors=2, rates=dict(known))
    for second in range(700):
        search.observe(RunStatus(env_steps=1 + second // 500, workers={"actor": 2}), float(second))
    assert (search.done, search.actors, search.rates) == (True, 1 if known else 2, known)
    if not known:
        reason = "nothing could be measured (fewer than two updates in 600 s); the run goes on with 2 actors"
        assert search.result == f"--actors auto: {reason}"


def test_an_actor_that_never_comes_ends_the_search_with_what_is_known():
    """The machine has no memory left for a third one."""
    search, ended = searched(lambda n: 100 * n, arrives=lambda wanted: min(wanted, 2), seconds=300)
    assert (search.done, search.actors) == (True, 2)
    assert ended is not None
    nobody, _ = searched(lambda _: 0, arrives=lambda _: 0, seconds=100)
    assert nobody.done is False  # a run that trains nothing at all measures nothing: the learner says what it waits for


def test_the_sentence_gives_the_rates():
    search, _ = searched(lambda n: min(n * 300, 600), max_actors=4)
    assert (
        search.result
        == "--actors auto: 2 actors from now on (env steps/s trained, by actors tried: 1: 300, 2: 600, 3: 600, 4: 600)"
    )


def test_a_search_that_the_end_of_the_run_cuts_short_chooses_from_what_it_measured():
    """Two actors were faster than one, and three were not measured yet."""
    search = ActorSearch(max_actors=8, actors=3, rates={1: 100.0, 2: 190.0})
    search.finish()
    assert (search.done, search.actors) == (True, 2)
