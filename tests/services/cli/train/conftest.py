"""Plans of runs: the environment of a preset is tried in a process of its own once, and not again for each plan."""

import pytest

from services.cli.env_trial import check_environment
from services.cli.train import plan

_tried = set()


def _once(settings):
    key = settings.model_dump_json(include={"env", "algorithm", "model", "policy_server"})
    if key not in _tried or settings.env.entry_point:  # the module of an entry point is another one in each folder
        check_environment(settings)
    _tried.add(key)


@pytest.fixture(autouse=True)
def _environments_tried_once(monkeypatch):
    monkeypatch.setattr(plan, "check_environment", _once)
