"""The Gradient message: its schema is the network's, and what cannot be averaged is refused."""

from __future__ import annotations

import numpy as np
import pytest

from common.algorithms.gradient import PARTS, gradients
from common.algorithms.settings.a3c import A3CGradSettings
from common.errors import DropReason, PeerError
from common.models import nets
from common.models.snapshot import Layout
from common.models.spec import ModelSettings
from common.wire.arrays import check_schema
from common.wire.messages import Gradient

pytestmark = pytest.mark.pure

MODEL = ModelSettings(hidden=(4,))


def ships(env, precision="fp32"):
    """What actors of two environments send of four steps."""
    return gradients(settings=A3CGradSettings(gradient_precision=precision), model=MODEL, env=env, length=4, num_envs=2)


def message(shipment, *, env_steps=8, **arrays):
    """A gradient of zeros, but for `arrays`."""
    zeros = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in shipment.schema}
    return Gradient(seq=0, version=0, env_steps=env_steps, shipped=env_steps, arrays=zeros | arrays)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "uint16")])
def test_a_gradient_is_as_long_as_the_network_has_parameters(vector_env, precision, dtype):
    """Of the network that a learner would build, without building it."""
    shipment = ships(vector_env, precision)
    size = Layout.of(nets.build(MODEL, vector_env)).size
    assert shipment.message is Gradient
    assert [(spec.name, spec.dtype, spec.shape) for spec in shipment.schema] == [
        ("gradient", dtype, (size,)),
        ("loss_parts", "float32", (len(PARTS),)),
        ("episode_return", "float32", (-1,)),
        ("episode_length", "int32", (-1,)),
    ]
    shipment.check(message(shipment))


def test_a_gradient_of_another_length_is_refused(vector_env):
    """An actor with another network: the schema says so, before anything is added up."""
    shipment = ships(vector_env)
    with pytest.raises(PeerError, match=r"array gradient: found float32 \[3\], wanted float32 \[") as raised:
        check_schema(message(shipment, gradient=np.zeros(3, np.float32)).arrays, shipment.schema)
    assert raised.value.reason == DropReason.SCHEMA


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_bfloat16_that_is_not_finite_is_refused(vector_env, bits):
    """Infinity and NaN of either sign, which an integer array hides from the check of floats."""
    shipment = ships(vector_env, "bf16")
    broken = message(shipment).arrays["gradient"].copy()
    broken[5] = bits
    with pytest.raises(PeerError, match=rf"array gradient at \[5\]: found bfloat16 {bits:#06x}, wanted finite") as raised:
        shipment.check(message(shipment, gradient=broken))
    assert raised.value.reason == DropReason.NON_FINITE


def test_the_largest_finite_bfloat16_is_taken(vector_env):
    """The check must not refuse what is merely large."""
    shipment = ships(vector_env, "bf16")
    shipment.check(message(shipment, gradient=np.full_like(message(shipment).arrays["gradient"], 0x7F7F)))


def test_a_gradient_of_more_env_steps_than_a_rollout_has_is_refused(vector_env):
    """They are its weight: one actor could outvote all others."""
    shipment = ships(vector_env)
    with pytest.raises(PeerError, match="env steps of a gradient: found 9, wanted at most 8") as raised:
        shipment.check(message(shipment, env_steps=9))
    assert raised.value.reason == DropReason.SCHEMA
