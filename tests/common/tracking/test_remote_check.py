"""Tests of the check that a tracker can work, before a run starts."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from common.config.load import load_settings
from common.errors import ConfigError
from common.tracking.remote import check_tracking
from services.cli.app import main

pytestmark = pytest.mark.service


def test_the_default_needs_no_package():
    check_tracking(load_settings(preset=None, environ={}).settings.run.tracking, {})


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, capsys):
    (tmp_path / "trackio").mkdir()  # as a run of W&B leaves a folder `wandb`
    monkeypatch.setattr("common.tracking.remote.find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
    assert main(["config", "validate", "cartpole", "run.tracking=[tensorboard,trackio]"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install 'rookery[trackio]', or leave it out of run.tracking")


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the extra mlflow; importing it takes seconds")
def test_mlflow_without_a_server_is_refused():
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        check_tracking(["mlflow"], {})
    check_tracking(["mlflow"], {"MLFLOW_TRACKING_URI": "http://127.0.0.1:5000"})


def test_wandb_without_an_account_is_refused_unless_it_is_to_need_none(monkeypatch, tmp_path):
    monkeypatch.setattr("common.tracking.remote.find_spec", lambda _: SimpleNamespace(origin="wandb/__init__.py"))
    key = tmp_path / "netrc"
    with pytest.raises(ConfigError, match=r"no .*netrc, wanted an account, or a mode that needs none"):
        check_tracking(["wandb"], {"NETRC": str(key)})
    for access in ("WANDB_API_KEY", "WANDB_MODE"):
        check_tracking(["wandb"], {"NETRC": str(key), access: "offline"})
        with pytest.raises(ConfigError, match="wanted an account"):  # as compose passes a variable that is not set
            check_tracking(["wandb"], {"NETRC": str(key), access: ""})
    key.touch()  # as `wandb login` does
    check_tracking(["wandb"], {"NETRC": str(key)})


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"run\.tracking"):
        load_settings(preset=None, overrides=["run.tracking=[neptune]"], environ={})
