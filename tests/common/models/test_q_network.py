"""Q networks: one stream or two, and the identities of the second."""

from __future__ import annotations

import pytest
import torch

from common.algorithms.api import NetworkPolicy
from common.envs.spec import ActionSpec, EnvSpec
from common.models import nets
from common.models.memory import Past
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

FOUR = ActionSpec(choices=(4,), shape=())
IMAGES = EnvSpec(observation_shape=(20, 24), observation_dtype="uint8", action=FOUR, frame_stack=3, frame_skip=1)
VECTORS = EnvSpec(observation_shape=(5,), observation_dtype="float32", action=FOUR, frame_stack=1, frame_skip=1)
MODEL = ModelSettings(conv=((8, 4, 2),), hidden=(16, 8))


def observations(env, count=6):
    """Random observations as an actor would see them."""
    generator = torch.Generator().manual_seed(5)
    if env.observation_dtype == "uint8":
        return torch.randint(0, 256, (count, *env.network_input_shape), dtype=torch.uint8, generator=generator)
    return torch.randn((count, *env.network_input_shape), generator=generator)


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("hidden", [(16, 8), (8,), ()])
@pytest.mark.parametrize("env", [IMAGES, VECTORS], ids=["images", "vectors"])
def test_every_action_gets_a_value(env, hidden, dueling):
    """Images and vectors, with any number of hidden layers, none included."""
    net = nets.build_q_network(MODEL.model_copy(update={"hidden": hidden}), env, dueling=dueling)
    values = net(observations(env))[0]
    assert values.shape == (6, 4)
    assert values.dtype == torch.float32


def test_dueling_values_have_the_state_value_as_their_mean():
    """Equation 9: advantages are centred, so that V is the mean of Q and the order of the actions is that of A."""
    value, advantage = torch.tensor([[2.0], [-1.0]]), torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    values = nets.duel(value, advantage)
    assert values.tolist() == [[0.0, 1.0, 5.0], [-2.0, -2.0, 1.0]]
    torch.testing.assert_close(values.mean(dim=1, keepdim=True), value)


def test_what_is_added_to_all_advantages_changes_no_value():
    """The two streams can be distinguished: a constant cannot move from one to the other."""
    generator = torch.Generator().manual_seed(0)
    value, advantage = torch.randn(5, 1, generator=generator), torch.randn(5, 3, generator=generator)
    torch.testing.assert_close(nets.duel(value, advantage + 7.0), nets.duel(value, advantage))


def test_the_streams_share_all_but_the_last_hidden_layer():
    """As in the paper: what is seen is computed once, what is made of it twice."""
    net = nets.build_q_network(MODEL, IMAGES, dueling=True)
    names = {name for name, _ in net.named_parameters()}
    assert {name.split(".")[0] for name in names} == {"trunk", "action_stream", "value_stream"}
    assert [p.shape[0] for n, p in net.trunk.hidden.named_parameters() if n.endswith("weight")] == [16]
    assert [p.shape[0] for n, p in net.value_stream.named_parameters() if n.endswith("weight")] == [8, 1]
    assert [p.shape[0] for n, p in net.action_stream.named_parameters() if n.endswith("weight")] == [8, 4]


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("hidden", [(16, 8), (8,), ()])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_memory_computes_in_float32_between_layers_of_bfloat16(cell, hidden, dueling):
    """As an actor of that precision builds it; the layers behind it get what they compute in, also where none is before it."""
    model = MODEL.model_copy(update={"recurrent": cell, "recurrent_size": 6, "hidden": hidden})
    nets_of = [nets.build_q_network(model, VECTORS, dueling=dueling, seed=1) for _ in range(2)]
    acting = [NetworkPolicy(net, precision=each, seed=0) for net, each in zip(nets_of, ("fp32", "bf16"), strict=True)]
    past = Past(torch.zeros(2, model.state_size), torch.ones(3, 2, dtype=torch.bool))
    (exact, _), (rounded, state) = (policy.network(observations(VECTORS), past) for policy in acting)
    assert rounded.dtype == state.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=2e-3, rtol=0)


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("hidden", [(16, 8), (8,), ()])
@pytest.mark.parametrize("env", [IMAGES, VECTORS], ids=["images", "vectors"])
def test_in_bfloat16_the_heads_still_compute_in_float32(env, hidden, dueling):
    """A bf16 actor, and training under autocast: values near those in float32, and float32 themselves."""
    net = nets.build_q_network(MODEL.model_copy(update={"hidden": hidden}), env, dueling=dueling, seed=1)
    exact = net(observations(env))[0]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = net(observations(env))[0]
    rounded = net.bfloat16()(observations(env))[0]
    for values in (mixed, rounded):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, exact, atol=2e-3, rtol=0)


def test_a_fresh_network_promises_next_to_nothing():
    """Values begin near 0 whatever is seen: large random ones would have to be unlearned first."""
    values = nets.build_q_network(MODEL, IMAGES, dueling=True, seed=3)(observations(IMAGES))[0]
    assert values.abs().max() < 0.1
    assert values.std() > 0


def test_the_seed_decides_the_weights():
    """And torch's global random state does not."""
    first, again, other = (
        nets.build_q_network(MODEL, VECTORS, dueling=True, seed=seed)(observations(VECTORS))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
