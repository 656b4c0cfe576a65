"""The memory of recurrent policies: against torch's own layers, and against the actor that recorded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.algorithms.batch import collate
from common.algorithms.moments import Moments
from common.algorithms.on_policy import ActorCriticPolicy, network_outputs, recorded_log_prob
from common.algorithms.payload import check_trajectory, trajectory_schema
from common.envs.make import make
from common.envs.spec import EnvSettings
from common.models.memory import Past, Recurrent
from common.models.spec import ModelSettings
from common.protocol.events import Experience
from services.acting.rollout import Rollout

pytestmark = pytest.mark.pure
T, B, F, H = 12, 5, 7, 6
CELLS = pytest.mark.parametrize("cell", ["lstm", "gru"])


def whole(cell, recurrent):
    """Return torch's layer of whole sequences with the weights of `recurrent`."""
    layer = nn.LSTM(F, H) if cell == "lstm" else nn.GRU(F, H)
    layer.load_state_dict({f"{name}_l0": value for name, value in recurrent.cell.state_dict().items()})
    return layer


@CELLS
def test_outputs_and_gradients_are_those_of_each_episode_alone(cell):
    torch.manual_seed(1)
    recurrent = Recurrent(F, ModelSettings(recurrent=cell, recurrent_size=H))
    features = torch.randn(T, B, F, requires_grad=True)
    state = torch.randn(B, 2 * H if cell == "lstm" else H)
    start = torch.rand(T, B) < 0.25
    assert start[1:].any()
    assert start[0].any()
    weight = torch.randn(T, B, H)
    outputs, states = recurrent(features.flatten(0, 1), Past(state, start))
    (outputs.view(T, B, H) * weight).sum().backward()

    layer, other = whole(cell, recurrent), features.detach().clone().requires_grad_()
    total = torch.zeros(())
    for b in range(B):
        begins = [0, *(t for t in range(1, T) if start[t, b])]
        for begin, end in zip(begins, [*begins[1:], T], strict=True):
            first = torch.zeros_like(state[b]) if start[begin, b] else state[b]
            given = first.view(1, 1, -1)
            given = tuple(part.contiguous() for part in given.split(H, dim=2)) if cell == "lstm" else given
            found, last = layer(other[begin:end, b : b + 1], given)
            torch.testing.assert_close(outputs.view(T, B, H)[begin:end, b], found[:, 0], rtol=0, atol=1e-6)
            last = torch.cat(last, dim=2) if cell == "lstm" else last
            torch.testing.assert_close(states.view(T, B, -1)[end - 1, b], last.flatten(), rtol=0, atol=1e-6)
            total = total + (found[:, 0] * weight[begin:end, b]).sum()
    total.backward()
    torch.testing.assert_close(features.grad, other.grad, rtol=0, atol=1e-6)
    for name, parameter in recurrent.cell.named_parameters():
        torch.testing.assert_close(parameter.grad, layer.get_parameter(f"{name}_l0").grad, rtol=1e-6, atol=1e-5)


@CELLS
def test_a_state_that_is_not_finite_ends_with_its_episode(cell):
    """One bad observation must not spoil all episodes to come."""
    recurrent = Recurrent(F, ModelSettings(recurrent=cell, recurrent_size=H))
    state = torch.zeros(2, 2 * H if cell == "lstm" else H)
    start = torch.tensor([[False, False], [True, False]])
    features = torch.ones(2, 2, F)
    wanted, _ = recurrent(features.flatten(0, 1), Past(state, start))
    state[0] = torch.nan
    outputs, _ = recurrent(features.flatten(0, 1), Past(state, start))
    torch.testing.assert_close(outputs[1:], wanted[1:], rtol=0, atol=0)


@CELLS
@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_the_learner_computes_what_the_actor_recorded(cell, autoreset):
    """Also the states at the end of a second rollout, which began in the middle of episodes."""
    settings = EnvSettings(entry_point="common.envs.probes:counting", num_envs=3, autoreset=autoreset, frame_stack=2)
    model = ModelSettings(hidden=(8,), recurrent=cell, recurrent_size=H)
    environment = make(settings)
    policy = ActorCriticPolicy(model=model, env=environment.spec, precision="fp32", seed=1)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)) * 0.3)
    sizes = {"length": T, "num_envs": 3}
    recorded = recorded_log_prob(**sizes)
    schema = trajectory_schema(environment.spec, **sizes, recorded=recorded, state_size=model.state_size)
    rollout = Rollout(schema, environment.reset(3))
    for number in range(2):
        for t in range(T):
            policy.begin_episodes(torch.from_numpy(rollout.start(t)))
            acted = {name: value.numpy() for name, value in policy.act(torch.from_numpy(rollout.observation)).items()}
            action = acted.pop("action")
            rollout.record(t, action, acted, environment.step(action))
        arrays = rollout.finish(policy.memory.numpy())
        rollout.begin_next()
        check_trajectory(environment.spec, arrays)
        sample = Experience(version=0, env_steps=0, arrays=arrays)
        batch = collate([sample], environment.spec, state_size=model.state_size)
        outputs = network_outputs(policy.network, batch, moments=Moments(), precision="fp32")
        torch.testing.assert_close(outputs.log_prob[batch.valid], batch.log_prob[batch.valid], rtol=0, atol=1e-5)
        torch.testing.assert_close(outputs.state, batch.memory[1], rtol=0, atol=1e-5)
        assert number == 0 or batch.memory[0].any()
