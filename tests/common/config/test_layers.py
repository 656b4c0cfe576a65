"""YAML as configuration means it, and the merging of trees."""

import pytest

from common.config.layers import DEFAULT, Layer, comparable, leaves, merge_layers, nest, parse_yaml, source_of
from common.errors import ConfigError

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),  # text in YAML 1.1: the commonest slip of all
        ("1.", 1.0),
        (".5", 0.5),
        ("8", 8),
        ("-3", -3),
        ("10_000_000", 10_000_000),
        ("true", True),
        ("no", "no"),  # false in YAML 1.1
        ("off", "off"),
        ("12:30", "12:30"),  # 750 in YAML 1.1
        ("2026-01-01", "2026-01-01"),  # a date in YAML 1.1
        ("007", "007"),
        ("0x10", "0x10"),
        (".inf", ".inf"),
        ("null", None),
        ("", None),
        ('"8"', "8"),
        ("[1, [2, x]]", [1, [2, "x"]]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("tcp://127.0.0.1:5700", "tcp://127.0.0.1:5700"),
    ],
)
def test_a_scalar_is_what_it_looks_like(text, value):
    """People write numbers, words, times and addresses without thinking of YAML's older rules."""
    found = parse_yaml(text, source="test")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3 column 1 .*'a' occurs twice"),
        ("x:\n  a: 1\n  a: 1\n", "line 3 column 3 .*'a' occurs twice"),
        ("8: x", "8 is not text"),
        ("[a]: x", "is not text"),
        ("a: &x 1\nb: *x\n", "line 1 column 4 .*anchors, aliases and tags are not allowed"),
        ("a: &x [*x]\n", "anchors"),
        ("a: [&x {b: 1}]", "anchors"),
        ("a: *x", "aliases"),
        ("<<: {a: 1}", "line 1 column 1 .*'<<' would merge mappings"),
        ("a: {<<: {b: 1}}", "line 1 column 5 .*'<<' would merge mappings"),
        ("a: !!timestamp 2026-01-01", "line 1 column 4 .*tags"),
        ("a: !!binary AAAA", "tags"),
        ("a: !!set {b}", "tags"),
        ("a: !!bool maybe", "tags"),
        ("a: !!map [b]", "tags"),
        ("a: ! b", "tags"),
        ("a: [1", "line 1"),
        ("a: !!python/object:os.system {}", "tags"),
        ("a: !!int x", "no valid YAML"),
        ("a: 1e999", "too large"),
        ("--- 1\n--- 2\n", "line 2"),
        ("a: \x00", "no valid YAML"),
        ("a: !!float nope", "no valid YAML"),
        ("[" * 500, "no valid YAML"),
    ],
)
def test_yaml_that_could_mislead_is_refused_with_its_place(text, said):
    """A key that occurs twice loses its first value in silence; anchors make a file mean more than it shows."""
    with pytest.raises(ConfigError, match=said) as caught:
        parse_yaml(text, source="file x.yaml")
    assert str(caught.value).startswith("file x.yaml")


def test_mappings_merge_and_all_else_is_replaced():
    """A user changes one number of a preset's section, or a whole list; the rest of the section stays."""
    tree, sources = merge_layers(
        [
            Layer(source="preset", values={"env": {"id": "a", "kwargs": {"x": 1, "y": 2}}, "model": {"hidden": [1, 2]}}),
            Layer(source="file", values={"env": {"kwargs": {"y": 3}}, "model": {"hidden": [9]}}),
            Layer(source="command line", values=nest(("env", "num_envs"), 4)),
        ]
    )
    assert tree == {"env": {"id": "a", "kwargs": {"x": 1, "y": 3}, "num_envs": 4}, "model": {"hidden": [9]}}
    assert sources == {
        "env.id": "preset",
        "env.kwargs.x": "preset",
        "env.kwargs.y": "file",
        "env.num_envs": "command line",
        "model.hidden": "file",
    }


def test_a_leaf_that_a_mapping_replaced_has_no_source_anymore():
    """An error at the mapping names the layer that has it."""
    preset = Layer(source="preset", values={"env": {"num_envs": 8, "id": "a"}})
    _, sources = merge_layers([preset, Layer(source="command line", values=nest(("env", "num_envs", "x"), 1))])
    assert sources == {"env.id": "preset", "env.num_envs.x": "command line"}
    assert source_of(("env", "num_envs"), sources) == "command line"


def test_empty_keyword_arguments_are_none_and_an_empty_section_changes_nothing():
    """There is no other way to leave out an argument of a preset."""
    preset = Layer(source="preset", values={"env": {"id": "a", "kwargs": {"x": 1}}, "model": {"hidden": [9]}})
    tree, _ = merge_layers([preset, Layer(source="command line", values={"env": {"kwargs": {}}, "model": {}})])
    assert tree == {"env": {"id": "a", "kwargs": {}}, "model": {"hidden": [9]}}


def test_an_empty_argument_replaces_the_one_of_a_preset():
    """A mapping among keyword arguments can be emptied as the arguments themselves can."""
    preset = Layer(source="preset", values={"env": {"kwargs": {"options": {"x": 1}, "n": 3}}})
    tree, sources = merge_layers([preset, Layer(source="command line", values=nest(("env", "kwargs", "options"), {}))])
    assert tree == {"env": {"kwargs": {"options": {}, "n": 3}}}
    assert source_of(("env", "kwargs", "options"), sources) == "command line"


def test_merging_leaves_its_layers_as_they_were():
    """Layers are shared between a check and a run."""
    lower = Layer(source="a", values={"s": {"k": 1}})
    merge_layers([lower, Layer(source="b", values={"s": {"k": 2}})])
    assert lower.values == {"s": {"k": 1}}


def test_the_source_of_a_value_is_its_own_or_its_neighbours():
    """An error may stand at a whole section, or inside a value that was set as one."""
    sources = {"env.kwargs": "file", "log.level": "command line"}
    assert source_of(("env", "kwargs", "x"), sources) == "file"
    assert source_of(("log",), sources) == "command line"
    assert source_of(("logs",), sources) == DEFAULT


def test_an_empty_mapping_is_a_leaf():
    """`env.kwargs: {}` is a value of its own, which provenance must name."""
    assert list(leaves({"env": {"kwargs": {}, "id": "x"}})) == [(("env", "kwargs"), {}), (("env", "id"), "x")]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        ({"a": [1e3], "b": 0.5}, {"b": 0.5, "a": [1000]}, True),
        (1, True, False),
        ({"a": [0]}, {"a": [False]}, False),
        (1, "1", False),
        (2**53, 2**53 + 1, False),  # as floats they are equal
    ],
)
def test_values_are_compared_as_a_reader_of_yaml_does(one, other, equal):
    assert (comparable(one) == comparable(other)) == equal
