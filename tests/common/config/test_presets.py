"""Presets as they ship, and files of the user's."""

import re

import pytest

from common.config.layers import leaves, parse_yaml
from common.config.load import find_preset, load_settings, preset_names
from common.errors import ConfigError

pytestmark = pytest.mark.pure


def test_the_runs_that_the_documentation_promises_ship():
    """`rookery train cartpole` is the first thing a newcomer types."""
    promised = {"cartpole", "cartpole-dqn", "pong", "pong-dqn", "pendulum", "pendulum-td3", "halfcheetah"}
    promised |= {"breakout", "spaceinvaders", "mountaincar", "mountaincar-continuous"}
    assert promised | {"halfcheetah-ppo", "hopper", "walker2d"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_run_with_an_end_of_its_own(name):
    """A renamed setting must not leave a preset behind."""
    assert load_settings(preset=name, environ={}).settings.run.preset == name
    assert "env_steps" in parse_yaml(find_preset(name).text, source=name)["target"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_says_what_it_is_and_why_its_numbers(name):
    """A preset is the page from which users start their own: it opens with a sentence and explains what it sets."""
    text = find_preset(name).text
    assert re.match(r"# \w.*\.\n# Measured: .+\n# Spaces: .+ -> .+\n\w", text)
    settings = len(list(leaves(parse_yaml(text, source=name))))
    assert len(re.findall(r"  # .{5}", text)) >= settings / 4


@pytest.mark.parametrize(
    ("name", "mean100", "env_steps"),
    [
        ("cartpole", 475, 100_000),
        ("cartpole-dqn", 475, 100_000),
        ("pong", 18, None),
        ("pong-dqn", 18, 800_000),
        ("breakout", 100, None),
    ],
)
def test_a_target_is_the_score_the_project_promises(name, mean100, env_steps):
    """`solved: true` must mean the published threshold on the plain game, however the other numbers are tuned."""
    settings = load_settings(preset=name, environ={}).settings
    assert settings.target.mean100 == mean100
    assert env_steps in (None, settings.target.env_steps)
    assert settings.env.sticky_actions == 0.0
    assert settings.env.frame_skip == 4


@pytest.mark.parametrize(("typed", "meant"), [("pogn", "pong"), ("cart-pole", "cartpole"), ("pong-impla", "pong-impala")])
def test_a_slip_in_a_presets_name_is_answered_with_the_nearest(typed, meant):
    """The commonest first error."""
    with pytest.raises(ConfigError, match=f"did you mean .*{meant}") as caught:
        find_preset(typed)
    assert repr(typed) in str(caught.value)


def test_a_name_like_nothing_gets_the_whole_list():
    """Nothing is near: the list, and that a file would do."""
    with pytest.raises(ConfigError, match=r"cartpole, .*pong.*your own \.yaml"):
        find_preset("zzzzzz")


def test_a_path_cannot_be_smuggled_in_as_a_name():
    """Names come from command lines of other programs too; only names that ship are looked up."""
    with pytest.raises(ConfigError, match="unknown preset"):
        find_preset("../presets/pong")


def test_a_file_of_ones_own_names_the_run(tmp_path):
    """`rookery train ./my-task.yaml`."""
    path = tmp_path / "my-task.yaml"
    path.write_text("env: {num_envs: 3}\n")
    loaded = load_settings(preset=str(path), environ={})
    assert (loaded.settings.run.preset, loaded.settings.env.num_envs) == ("my-task", 3)
    assert loaded.provenance["env.num_envs"] == f"file {path}"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    """A path with a slip, and a file that is no text."""
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot be read: (No such file|no UTF-8).*x\.yaml"):
        find_preset(str(path))
