"""Tests of evaluation settings: the run's, unless they are set for the process."""

from __future__ import annotations

import pytest

from common.config.run_config import RunConfig
from common.config.schema import Settings
from common.config.sections import EvaluationSettings, EvaluatorSettings
from services.evaluator import evaluation_settings
from services.worker import parse

pytestmark = pytest.mark.service

RUN = RunConfig.of(
    Settings(evaluator=EvaluatorSettings(every_seconds=10.0, episodes=20, cpu_share=0.5, name="the-learners-own")), run_id="r"
)


def played(*words, environ=None):
    """Return the evaluation settings of an evaluator with that command line."""
    return evaluation_settings(parse("evaluator", ["--learner", "tcp://127.0.0.1:5999", *words], environ or {}).loaded, RUN)


def test_an_evaluator_with_an_address_alone_has_the_settings_of_the_run():
    """A run of a minute is evaluated every 10 s, on whichever machine its evaluator was started."""
    assert played() == RUN.evaluation == EvaluationSettings(every_seconds=10.0, episodes=20, cpu_share=0.5)


def test_its_own_settings_win_key_by_key(tmp_path):
    """On a machine of its own it may take every core; how many episodes make a score is still the run's."""
    file = tmp_path / "own.yaml"
    file.write_text("evaluator: {every_seconds: 5}\n")
    own = played("evaluator.cpu_share=1.0", "--config", str(file), environ={"ROOKERY_EVALUATOR__EPISODES": "10"})
    assert (own.cpu_share, own.every_seconds, own.episodes) == (1.0, 5.0, 10)
    assert played("evaluator.cpu_share=1.0").episodes == 20


def test_an_evaluator_that_a_run_does_not_start_has_settings_of_its_own(tmp_path):
    """`evaluator.enabled: false` in a file that learner and evaluator share is for `rookery train`."""
    file = tmp_path / "own.yaml"
    file.write_text("evaluator: {enabled: false}\n")
    assert played("evaluator.episodes=7", "--config", str(file)).episodes == 7


def test_a_default_that_is_spelt_out_is_a_wish_too():
    """`evaluator.every_seconds=60` means 60, although that is what it would be without a run."""
    assert played("evaluator.every_seconds=60").every_seconds == 60.0
