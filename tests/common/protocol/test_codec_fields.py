"""Dataclasses against plain maps, checked by their annotations alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from common.errors import DecodeError
from common.protocol.codec import plan_fields, read_fields, write_fields
from common.units import AtLeast, Count, Seconds

pytestmark = pytest.mark.wire


@dataclass(frozen=True, kw_only=True)
class Egg:
    """A nested value."""

    weight: float
    fresh: bool = True


@dataclass(frozen=True, kw_only=True)
class Nest:
    """Every kind of field."""

    name: str
    eggs: tuple[Egg, ...]
    layers: tuple[int, ...] = field(default_factory=lambda: (1,))
    age: Seconds = 0.0
    birds: Count = 0
    height: Annotated[Count, AtLeast(-1)] = -1
    secret: str = ""


NEST = plan_fields(Nest, without=("secret",))
PLAIN = {
    "name": "rook",
    "eggs": [{"weight": 16.5, "fresh": False}],
    "layers": [3, -4],
    "age": 2.0,
    "birds": 2,
    "height": -1,
}
VALUE = Nest(name="rook", eggs=(Egg(weight=16.5, fresh=False),), layers=(3, -4), age=2.0, birds=2)


def test_a_value_becomes_plain_fields_in_declared_order() -> None:
    """The order of the header's keys is part of the golden bytes."""
    found = write_fields(VALUE, NEST)
    assert found == PLAIN
    assert list(found) == list(PLAIN)


def test_plain_fields_become_a_value() -> None:
    """And the kinds are the declared ones: tuples, not lists."""
    assert Nest(**read_fields(PLAIN, NEST, "nest")) == VALUE


def test_defaults_fill_what_is_missing_at_every_depth() -> None:
    """Fields that an earlier release does not send."""
    assert Nest(**read_fields({"name": "rook", "eggs": [{"weight": 1.0}]}, NEST, "nest")) == Nest(
        name="rook", eggs=(Egg(weight=1.0),)
    )


def test_whole_numbers_are_taken_as_seconds() -> None:
    """Other msgpack writers drop the point of 2.0; the field is a float all the same."""
    age = read_fields(PLAIN | {"age": 2}, NEST, "nest")["age"]
    assert (age, type(age)) == (2.0, float)
    assert type(write_fields(Nest(name="rook", eggs=(), age=2), NEST)["age"]) is float


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": 1}, "nest.name: found 1, wanted a string"),
        ({"name": b"x"}, "nest.name: found b'x', wanted a string"),
        ({"eggs": "egg"}, "nest.eggs: found 'egg', wanted a list"),
        ({"eggs": {}}, "nest.eggs: found {}, wanted a list"),
        ({"eggs": [1]}, r"nest.eggs\[0\]: found 1, wanted a map"),
        ({"eggs": [{"weight": 1.0}, {}]}, r"nest.eggs\[1\].weight: found nothing, wanted a value"),
        ({"eggs": [{"weight": 1.0, "fresh": 1}]}, r"nest.eggs\[0\].fresh: found 1, wanted true or false"),
        ({"layers": [1, 1.5]}, r"nest.layers\[1\]: found 1.5, wanted an integer from -"),
        ({"age": float("nan")}, "nest.age: found nan, wanted a finite number from 0"),
        ({"age": float("inf")}, "nest.age: found inf"),
        ({"age": -0.5}, "nest.age: found -0.5"),
        ({"age": True}, "nest.age: found True"),
        ({"age": "2"}, "nest.age: found '2'"),
        ({"birds": -1}, "nest.birds: found -1, wanted an integer from 0 to 9223372036854775807"),
        ({"birds": 2**63}, "nest.birds: found 9223372036854775808"),
        ({"birds": True}, "nest.birds: found True"),
        ({"birds": None}, "nest.birds: found None"),
        ({"height": -2}, "nest.height: found -2, wanted an integer from -1"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(changes: dict[str, object], sentence: str) -> None:
    """The sentence leads to the field, however deep."""
    with pytest.raises(DecodeError, match=sentence):
        read_fields(PLAIN | changes, NEST, "nest")


def test_a_foreign_value_comes_escaped_and_short_into_the_sentence() -> None:
    """Line breaks and megabytes of a hostile worker do not reach the log."""
    with pytest.raises(DecodeError) as caught:
        read_fields(PLAIN | {"birds": "x\n" * 10_000}, NEST, "nest")
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hint", [dict, bytes, "int | None", tuple, "tuple[int, str]", list[int], object])
def test_an_annotation_without_a_place_on_the_wire_is_refused_when_planned(hint: object) -> None:
    """A new message with a new kind of field fails at import, not in the middle of a run."""
    cls = dataclass(type("Odd", (), {"__annotations__": {"x": hint}}))
    with pytest.raises(TypeError, match="no place on the wire"):
        plan_fields(cls)
