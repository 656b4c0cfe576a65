"""Rates from readings of a counter."""

from __future__ import annotations

import pytest

from services.learner.rates import LONG_WINDOW, RATE_SPACING, RateWindow, StepRates

pytestmark = pytest.mark.pure


def test_nothing_measured_is_a_rate_of_zero():
    """The live view draws before the first step."""
    window = RateWindow()
    assert window.rates() == StepRates(last_10s=0.0, last_60s=0.0, run=0.0)
    window.add(5.0, 100.0)
    assert window.rates() == StepRates(last_10s=0.0, last_60s=0.0, run=0.0)


def test_each_window_sees_its_own_stretch():
    """100/s for 100 s, then 1000/s for 10 s."""
    window = RateWindow()
    for second in range(111):
        window.add(float(second), 100.0 * second if second <= 100 else 10_000.0 + 1000.0 * (second - 100))
    assert window.rates() == StepRates(last_10s=1000.0, last_60s=(50 * 100 + 10_000) / 60, run=20_000 / 110)


def test_a_run_shorter_than_a_window_is_measured_whole():
    """The first seconds show a rate, not a tenth of it."""
    window = RateWindow()
    for second in range(4):
        window.add(1000.0 + second, 50.0 * second)
    assert window.rates() == StepRates(last_10s=50.0, last_60s=50.0, run=50.0)


def test_a_resumed_total_is_not_counted_as_work_of_this_run():
    """A learner that resumes shows its old total at the first reading."""
    window = RateWindow()
    window.add(0.0, 1_000_000.0)
    window.add(10.0, 1_000_100.0)
    assert window.rates().run == 10.0


def test_a_stall_shows_as_zero():
    """Nothing moved for ten seconds."""
    window = RateWindow()
    for second in range(30):
        window.add(float(second), 10.0 * min(second, 10))
    assert window.rates().last_10s == 0.0
    assert window.rates().run == 100.0 / 29


@pytest.mark.parametrize("interval", [0.05, 0.8, 2.0, 8.0, 12.0, 20.0, 90.0])
def test_a_rate_is_from_update_to_update_whenever_it_is_read(interval):
    """Readings every 0.2 s, of updates that come as regularly as a slow simulator lets them."""
    window = RateWindow()
    at = min(interval, 0.2)
    for number in range(round(6 * interval / at)):
        done = int(number * at / interval + 1e-6)
        window.add(1000.0 + number * at, 2048.0 * done)
        if done >= 2:
            rates = window.rates()
            assert (rates.last_10s, rates.last_60s) == pytest.approx((2048 / interval, 2048 / interval), rel=0.02)


def test_memory_is_bounded_however_often_it_is_read():
    """A day of readings, a hundred a second."""
    window = RateWindow()
    for number in range(50_000):
        window.add(number / 100, float(number))
    assert len(window._kept) <= LONG_WINDOW / RATE_SPACING + 2
    assert window.rates().last_60s == pytest.approx(100.0)
