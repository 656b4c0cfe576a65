"""The comparison with RecurrentPPO: what it says, and what it says where there is nothing to compare with."""

import importlib.util

import pytest

from benchmarks import recurrent
from benchmarks.recurrent import Solved

pytestmark = pytest.mark.pure


def test_each_seed_is_a_row_of_theirs_and_one_of_ours(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(recurrent, "theirs", lambda _: Solved(95_936, 3.0))
    monkeypatch.setattr(recurrent, "ours", lambda seed: Solved(120_000, 1.44) if seed == 1 else None)
    assert recurrent.main(["--seeds", "1", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| 1 | RecurrentPPO | 95,936 | 3.0 |",
        "| 1 | cartpole-velocity-free | 120,000 | 1.4 |",
        "| 2 | RecurrentPPO | 95,936 | 3.0 |",
        "| 2 | cartpole-velocity-free | not solved | |",
    ]


def test_a_missing_package_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert recurrent.main([]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "found no sb3_contrib, wanted it installed; pip install sb3-contrib" in line
