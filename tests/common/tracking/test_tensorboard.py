"""Event files, as TensorBoard reads them."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.tracking.background import Point
from common.tracking.tensorboard import TensorBoardEvents

pytestmark = pytest.mark.service


@pytest.mark.parametrize("hours", [1, -1])
def test_a_resumed_run_replaces_the_points_beyond_its_checkpoint_though_the_clock_was_set_back(tmp_path, monkeypatch, hours):
    for now, env_steps, value in ((2e9, 0, 1.0), (2e9 + hours * 3600, 5, 2.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        events = TensorBoardEvents(tmp_path, env_steps=env_steps, run=None)
        events.write([Point(env_steps=env_steps + 1 + n, unix_seconds=now, values={"return": value}) for n in range(10)])
        events.close()
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("return")
    assert [(event.step, event.value) for event in shown] == [
        *((step, 1.0) for step in range(1, 6)),
        *((step, 2.0) for step in range(6, 16)),
    ]
