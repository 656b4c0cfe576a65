"""The runs that a command line with several seeds or values stands for."""

import pytest

from common.errors import ConfigError
from services.cli.series.grid import has_grid, members, parse_seeds, split_overrides, split_values

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("1-5", (1, 2, 3, 4, 5)), ("1,3,7", (1, 3, 7)), ("1-3,7", (1, 2, 3, 7)), ("4", (4,)), ("2,1-3", (2, 1, 3))],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "5-1", "a", "1-", "-1", "1;2", "0-999999999", "1,,2"])
def test_other_seeds_are_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="1-5 or 1,3,7"):
        parse_seeds(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,3e-4", ["1e-3", "3e-4"]),
        ("[64, 64]", ["[64, 64]"]),
        ("[64, 64], [128]", ["[64, 64]", "[128]"]),
        ("{a: 1, b: [2, 3]}", ["{a: 1, b: [2, 3]}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("", [""]),
    ],
)
def test_only_commas_outside_brackets_and_quotes_separate_values(text, values):
    assert split_values(text) == values


def test_a_list_in_brackets_is_no_grid():
    assert not has_grid(["model.hidden=[64, 64]", "env.num_envs=8"])
    assert has_grid(["model.hidden=[64, 64],[128]"])


def test_a_setting_whose_text_is_a_list_by_itself_has_one_value():
    """The addresses of two ranks of the learner became two runs."""
    addresses = "actor.learner=tcp://127.0.0.1:5700,tcp://127.0.0.1:5701"
    assert not has_grid(["learner.ranks=2", addresses])
    assert split_overrides([addresses, "env.id=A,B"]) == ((addresses,), {"env.id": ("A", "B")})


def test_1_and_true_are_two_values():
    assert split_overrides(["env.kwargs.x=true,1"]) == ((), {"env.kwargs.x": ("true", "1")})


def test_each_combination_has_each_seed():
    shared, grid = split_overrides(["env.num_envs=8", "algorithm.learning_rate=1e-3,3e-4", "model.hidden=[64, 64],[8]"])
    runs = members(grid, (1, 2))
    assert shared == ("env.num_envs=8",)
    assert len(runs) == 8
    assert runs[1].name == "learning_rate=1e-3-hidden=_64_64_-s2"
    assert runs[1].overrides == ("algorithm.learning_rate=1e-3", "model.hidden=[64, 64]", "run.seed=2")
    assert len({run.name for run in runs}) == 8


def test_names_stay_different_where_the_values_differ_in_characters_that_a_name_cannot_have():
    runs = members({"env.id": ("a/b", "a:b")}, (1,))
    assert len({run.name for run in runs}) == 2
    assert not any(set(run.name) & set("/:") for run in runs)


def test_a_number_in_a_name_is_of_the_values_whatever_the_seeds():
    grid = {"env.id": ("a/b", "a:b")}
    assert {run.name for run in members(grid, (1, 2))} < {run.name for run in members(grid, (1, 2, 3))}


def test_a_name_is_cut_to_the_length_that_a_file_system_takes():
    """With that of its log; a letter is more than a byte."""
    values = tuple("{x: " + 200 * "\u00e9" + end for end in ("a}", "b}"))
    names = [run.name for run in members({"env.kwargs": values}, (1, 2**31 - 1))]
    assert len(set(names)) == 4
    assert max(len(f"{name}.log".encode()) for name in names) <= 255
    assert names[3].startswith("001-kwargs=_x_\u00e9")
    assert names[3].endswith("-s2147483647")


def test_settings_of_one_name_in_two_sections_are_named_in_full():
    runs = members({"actor.torch_threads": ("1", "2"), "learner.torch_threads": ("1", "2")}, (1,))
    assert runs[1].name == "actor.torch_threads=1-learner.torch_threads=2-s1"


@pytest.mark.parametrize(
    "text",
    ["run.seed=1,2", "run.dir=a,b", "env.num_envs=4,", "env.num_envs=4,4", "algorithm.gamma=0.9,9e-1", "model.hidden=[8],[ 8 ]"],
)
def test_values_that_make_no_series_are_refused(text):
    with pytest.raises(ConfigError):
        split_overrides([text])


@pytest.mark.parametrize("second", ["algorithm.gamma=0.7", "algorithm.gamma=0.7,0.6"])
def test_a_setting_with_several_values_is_set_once(second):
    """One of the two would have no effect."""
    with pytest.raises(ConfigError, match=r"algorithm.gamma is set 2 times: found algorithm.gamma=0.9,0.8, wanted all of its"):
        split_overrides(["algorithm.gamma=0.9,0.8", second])


def test_a_series_has_a_largest_size():
    with pytest.raises(ConfigError, match="at most 1000"):
        members({"env.num_envs": tuple(map(str, range(100)))}, range(11))
