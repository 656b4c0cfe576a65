"""The picture of a run."""

import pytest

from common.runtime.run_directory import RunDirectory
from services.cli.train.outcome import curve_points, draw_curve

pytestmark = pytest.mark.service

CSV = """wall_seconds,env_steps,episode_return_mean,evaluation_return
5.0,1000,,
10.0,2000,-20.5,
12.0,2400,,-19.0
15.0,3000,-18.0,-17.5
"""


def test_rows_with_empty_cells_give_the_points_they_have():
    """The learner writes a row per update and per evaluation; neither fills all columns."""
    rows = [{"env_steps": "1", "r": ""}, {"env_steps": "2", "r": "-3.5"}, {"env_steps": "3"}]
    assert curve_points(rows, "env_steps", "r") == ([2.0], [-3.5])


@pytest.mark.parametrize("tail", ["-17.0,-16.5\n", "-", "-\n", "-17.0,-\n"])
def test_a_run_leaves_a_picture_whether_its_last_row_is_whole_or_was_cut_short(tmp_path, tail):
    """A PNG that a browser opens."""
    (tmp_path / "learning_curve.csv").write_text(f"{CSV}18.0,3600,{tail}")
    path = draw_curve(RunDirectory(tmp_path), title="pong, seed 1", target=18.0)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", [None, "wall_seconds,env_steps,episode_return_mean,evaluation_return\n5.0,1000,,\n"])
def test_a_run_too_short_for_a_point_leaves_none(tmp_path, text):
    """Ctrl-C after five seconds: no empty picture, no error."""
    if text is not None:
        (tmp_path / "learning_curve.csv").write_text(text)
    assert draw_curve(RunDirectory(tmp_path), title="pong", target=None) is None
    assert not list(tmp_path.glob("*.png"))
