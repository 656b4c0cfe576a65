"""Errors of a configuration in words."""

import pytest
from pydantic import ValidationError

from common.config.errors import config_error, json_schema, schema_at, wanted
from common.config.load import load_settings
from common.errors import ConfigError

pytestmark = pytest.mark.pure

WIDTH = "integer in 1..65536"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("env.num_envs", "integer in 1..4096"),
        ("learner.max_policy_lag", "integer >= 0"),
        ("checkpoint.every_seconds", "number > 0"),
        ("evaluator.every_seconds", "number >= 1"),  # at 0 the learner refused most results
        ("algorithm.clip", "number > 0.0 and < 1.0"),
        ("target.mean100", "number or null"),
        ("evaluator.enabled", "true or false"),
        ("env.id", "text"),
        ("env.kwargs", "mapping"),
        ("log.format", "one of auto, plain, json"),
        ("algorithm.name", "one of a3c, a3c-grad, dqn, impala, ppo, pqn, sac, td3"),
        ("model.hidden", f"list of {WIDTH}"),
        ("model.conv", f"list of list of ({WIDTH}, {WIDTH}, {WIDTH}) or one of auto, impala, impala-2, impala-4"),
    ],
)
def test_what_a_setting_accepts_is_said_in_words(setting, words):
    """The second half of every complaint."""
    assert wanted(schema_at(setting.split("."), {})) == words


def test_every_setting_can_be_described():
    """A new setting of a new kind must not end in `None` where its value is explained."""
    sections = json_schema()["properties"]
    keys = [(section, key) for section in sections for key in schema_at((section,), {})["properties"]]
    assert len(keys) > 50
    assert all(wanted(schema_at(key, {})) not in ("", "None") for key in keys)


def _complaint(*overrides):
    with pytest.raises(ConfigError) as caught:
        load_settings(preset=None, overrides=overrides, environ={})
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("env.num_envs=0", "env.num_envs: found 0 (command line), wanted integer in 1..4096"),
        ("env.num_envs='8'", "env.num_envs: found '8' (command line), wanted integer in 1..4096"),
        ("env.num_envs=true", "env.num_envs: found True (command line), wanted integer in 1..4096"),
        ("env.num_envs=8.0", "env.num_envs: found 8.0 (command line), wanted integer in 1..4096"),
        ("env.num_envs.deep=8", "env.num_envs: found {'deep': 8} (command line), wanted integer in 1..4096"),
        ("log=loud", "log: found 'loud' (command line), wanted mapping with some of level, format"),
        ("evaluator.enabled=yes", "evaluator.enabled: found 'yes' (command line), wanted true or false"),
        (
            "model.conv=[[1, 2]]",
            (
                "model.conv: found [[1, 2]] (command line), "
                f"wanted list of list of ({WIDTH}, {WIDTH}, {WIDTH}) or one of auto, impala, impala-2, impala-4"
            ),
        ),
        (
            "model.conv=resnet",
            (
                "model.conv: found 'resnet' (command line), "
                f"wanted list of list of ({WIDTH}, {WIDTH}, {WIDTH}) or one of auto, impala, impala-2, impala-4"
            ),
        ),
        (
            "model.conv=[[16, 3, 0]]",
            (
                "model.conv: found [[16, 3, 0]] (command line), "
                f"wanted list of list of ({WIDTH}, {WIDTH}, {WIDTH}) or one of auto, impala, impala-2, impala-4"
            ),
        ),
        ("model.hidden=[0]", f"model.hidden: found [0] (command line), wanted list of {WIDTH}"),
        (
            "algorithm.name=null",
            (
                "algorithm.name: found None (command line), "
                "wanted one of a3c, a3c-grad, dqn, impala, ppo, pqn, sac, td3, or your own package.module:ENTRY"
            ),
        ),
        (
            "run.store=/tmp/st",
            "run.store: found '/tmp/st' (command line), wanted an address such as s3://BUCKET/runs or file:///FOLDER",
        ),
        ("log.level=loud", "log.level: found 'loud' (command line), wanted one of debug, info, warning, error"),
        (
            "algorithm.name=sarsa",
            (
                "algorithm.name: found 'sarsa' (command line), "
                "wanted one of a3c, a3c-grad, dqn, impala, ppo, pqn, sac, td3, or your own package.module:ENTRY"
            ),
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_source_and_wish(override, line):
    """One clear line that names the value found and the value wanted."""
    assert _complaint(override) == line


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("env.num_env=1", "env.num_env: unknown key (command line); did you mean num_envs? env has id, entry_point"),
        ("evn.id=x", "evn: unknown section (command line); did you mean env? the configuration has run, env, model"),
        ("num_envs=1", "num_envs: unknown section (command line); did you mean env.num_envs?"),
        (  # and not `learner`, which is similar
            "learning_rate=1e-3",
            "learning_rate: unknown section (command line); did you mean algorithm.learning_rate?",
        ),
        ("env.batch=1", "env.batch: unknown key (command line); did you mean learner.batch?"),
        ("log.qqqqqq=1", "log.qqqqqq: unknown key (command line); log has level, format"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_and_the_valid_ones(override, hint):
    """A slip in the key, in the section, the section left out, the wrong section, and nothing like it."""
    assert _complaint(override).startswith(hint)


def test_all_problems_come_together_each_on_its_line():
    """Three slips in one file cost one start, not three."""
    first, *lines = _complaint("env.num_envs=0", "lgo.level=x", "model.conv=[[1, 2], [3]]").splitlines()
    assert first == "3 problems in the configuration:"
    assert [line.split()[0] for line in lines] == ["1.", "2.", "3."]
    assert sorted(line.split()[1] for line in lines) == ["env.num_envs:", "lgo:", "model.conv:"]


def test_settings_that_do_not_fit_each_other_name_the_one_to_change_and_its_source():
    """The preset's batch is fine, the user's minibatch is not: the line names its source."""
    text = _complaint("algorithm.minibatch=999999", "rollout.length=4")
    assert text.startswith("algorithm.minibatch: found 999999, wanted at most 64 = learner.batch")
    assert text.endswith("(algorithm.minibatch from command line)")


def test_a_section_that_does_not_hold_together_is_named():
    """An algorithm refuses two of its own settings together: there is no single value to show."""
    error = ValidationError.from_exception_data(
        "Settings",
        [
            {
                "type": "value_error",
                "loc": ("algorithm",),
                "input": {},
                "ctx": {"error": ValueError("kl_target needs kl_adaptive")},
            }
        ],
    )
    assert str(config_error(error, {"algorithm": {}}, {})) == "algorithm: kl_target needs kl_adaptive"


def test_the_name_of_an_algorithm_says_which_keys_its_section_has():
    """With several algorithms the keys of one are unknown to the other."""
    assert "clip" in schema_at(("algorithm",), {"algorithm": {"name": "ppo"}})["properties"]
    assert "clip" not in schema_at(("algorithm",), {"algorithm": {"name": "impala"}})["properties"]
    assert schema_at(("algorithm",), {"algorithm": {"name": "slip"}}) == schema_at(("algorithm",), {"algorithm": {"name": "ppo"}})


@pytest.mark.parametrize(
    ("overrides", "owner"),
    [
        (["algorithm.samples_per_insert=4"], "it is a setting of dqn, sac and td3, and algorithm.name is ppo; algorithm has "),
        (["algorithm.name=dqn", "algorithm.epochs=3"], "it is a setting of ppo and pqn, and algorithm.name is dqn; "),
    ],
)
def test_a_setting_of_another_algorithm_is_named_as_such(overrides, owner):
    """Copied from another preset: not a slip in the key, but in the algorithm."""
    assert owner in _complaint(*overrides)
