"""The search for the number of actors, on runs whose speed is known. No process, no clock."""

from __future__ import annotations

import pytest

from services.cli.search import ARRIVAL, LONGEST_WINDOW, SETTLE, WINDOW, ActorSearch
from services.cli.status import RunStatus

pytestmark = pytest.mark.pure


def searched(speed, *, most=64, batch=1, after=0, arrives=lambda wanted: wanted, seconds=2_000):
    """A search told once a second; `speed(actors)` is trained per second, in whole batches. Gives it, and when it was done."""
    search, trained = ActorSearch(most=most, after=after), 0.0
    for second in range(seconds):
        here = arrives(search.actors)
        trained += speed(here)
        seen = int(trained // batch) * batch
        search.look(RunStatus(env_steps=seen, peers={"actor": here}), float(second))
        if search.done:
            return search, second
    return search, None


@pytest.mark.parametrize(
    ("speed", "best"),
    [
        (lambda n: min(n * 300, 1000), 4),  # the learner's appetite is met by four
        (lambda _: 500, 1),  # one feeds it
        (lambda n: [0, 900, 1500, 1490, 1300, 1100][min(n, 5)], 2),  # more than two fight for the cores
        (lambda n: n * 100, 28),  # no end in sight: as many as may be tried (1, 2, 3, 4, 6, 9, 13, 19, 28)
    ],
)
def test_the_fewest_actors_that_are_as_fast_as_the_fastest_are_found(speed, best):
    """What a sweep by hand would have found."""
    search, ended = searched(speed, most=28)
    assert (search.done, search.actors) == (True, best)
    assert search.rates[best] >= 0.97 * max(search.rates.values())
    assert ended is not None


def test_batches_that_arrive_seconds_apart_hide_no_gain_that_counts():
    """2,048 env steps at a time: two readings could err by a sixth of what arrives in the window."""
    speed = [0, 1000, 1500, 1510, 1490]
    search, _ = searched(lambda n: speed[n], most=4, batch=2048)
    assert search.rates == {n: pytest.approx(speed[n], rel=0.06) for n in (1, 2, 3, 4)}
    assert speed[search.actors] >= 0.9 * max(speed)


def test_what_was_close_is_looked_at_again():
    """The machine was slow while two were tried: at a second look they are as fast as three."""
    looks = iter([500, 850, 1000, 990, 1010, 1150])  # one, two, three, four, who stay; then three and two once more
    speeds = {}
    search = ActorSearch(most=4)
    trained, actors, current = 0.0, 0, 0.0
    for second in range(2_000):
        if search.actors != actors:
            actors, current = search.actors, next(looks)
            speeds.setdefault(actors, []).append(current)
        trained += current
        search.look(RunStatus(env_steps=int(trained), peers={"actor": actors}), float(second))
        if search.done:
            break
    assert speeds == {1: [500], 2: [850, 1150], 3: [1000, 1010], 4: [990]}
    assert search.rates == {1: pytest.approx(500), 2: pytest.approx(1000), 3: pytest.approx(1005), 4: pytest.approx(990)}
    assert search.actors == 2


def test_nothing_is_measured_while_arrivals_and_warm_ups_distort_it():
    """A warm-up runs many times faster than training."""
    warm_up = 5_000
    search, _ = searched(lambda n: 100 * n if n > 1 else 150, after=warm_up, most=1)
    assert search.rates == {1: pytest.approx(150)}
    quick = ActorSearch(most=1, after=warm_up)
    for second in range(int(SETTLE + WINDOW) + 5):
        quick.look(RunStatus(env_steps=warm_up, peers={"actor": 1}), float(second))
    assert quick.rates == {}


def test_a_learner_that_falls_back_to_its_checkpoint_begins_the_window_anew():
    """Killed and resumed in the middle of a measurement: the loss is no slowness."""
    search = ActorSearch(most=1)
    trained = [*range(0, 1000, 100), *range(0, 5000, 100)]
    for second, env_steps in enumerate(trained):
        search.look(RunStatus(env_steps=env_steps + 1, peers={"actor": 1}), float(second))
    assert search.rates == {1: pytest.approx(100)}


def test_a_window_with_few_updates_is_widened_and_ends():
    """One update in twenty seconds: the rate is right after three of them, and the search goes no further than its deadline."""
    search, ended = searched(lambda _: 100, most=1, batch=2000)
    assert search.rates[1] == pytest.approx(100, rel=0.1)
    assert ended <= ARRIVAL + SETTLE + LONGEST_WINDOW + 20


def test_an_actor_that_never_comes_ends_the_search_with_what_is_known():
    """The machine has no memory left for a third one."""
    search, ended = searched(lambda n: 100 * n, arrives=lambda wanted: min(wanted, 2), seconds=300)
    assert (search.done, search.actors) == (True, 2)
    assert ended is not None
    nobody, _ = searched(lambda _: 0, arrives=lambda _: 0, seconds=100)
    assert nobody.done is False  # a run that trains nothing at all measures nothing: the learner says what it waits for


def test_the_sentence_gives_the_figures():
    """So that the user can judge."""
    search, _ = searched(lambda n: min(n * 300, 600), most=4)
    assert (
        search.sentence
        == "--actors auto: 2 actors from now on (env steps/s trained, by actors tried: 1: 300, 2: 600, 3: 600, 4: 600)"
    )
