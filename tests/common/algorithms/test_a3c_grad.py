"""A3C by gradients: the message, what actors compute, and what the learner makes of a group."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from common.algorithms.a3c import LOSS_PARTS, single_pass_loss
from common.algorithms.a3c_grad import A3CGrad, GradientPolicy, gradient_payload
from common.algorithms.api import RunProgress, WorkerContext
from common.algorithms.batch import collate
from common.algorithms.moments import Moments
from common.algorithms.on_policy import network_outputs, return_inputs
from common.algorithms.returns import gae
from common.algorithms.settings import A3CGradSettings
from common.errors import DropReason, ProtocolError
from common.models import nets, snapshot
from common.models.snapshot import ParameterLayout
from common.models.spec import ModelSettings
from common.protocol.content import check_schema
from common.protocol.events import Experience
from common.protocol.messages import Gradient

pytestmark = pytest.mark.pure


# --- the message ---


SMALL = ModelSettings(hidden=(4,))


def payload_of(env, precision="fp32"):
    """The message of four steps of two environments."""
    return gradient_payload(settings=A3CGradSettings(gradient_precision=precision), model=SMALL, env=env, length=4, num_envs=2)


def message(payload, *, env_steps=8, **arrays):
    """A gradient of zeros, but for `arrays`."""
    zeros = {spec.name: np.zeros([max(0, axis) for axis in spec.shape], spec.dtype) for spec in payload.schema}
    return Gradient(seq=0, version=0, env_steps=env_steps, env_steps_sent=env_steps, arrays=zeros | arrays)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "uint16")])
def test_a_gradient_is_as_long_as_the_network_has_parameters(vector_env, precision, dtype):
    """Of the network that a learner would build, without building it."""
    payload = payload_of(vector_env, precision)
    size = ParameterLayout.of(nets.build_actor_critic(SMALL, vector_env)).size
    assert payload.message_type is Gradient
    assert [(spec.name, spec.dtype, spec.shape) for spec in payload.schema] == [
        ("gradient", dtype, (size,)),
        ("loss_parts", "float32", (len(LOSS_PARTS),)),
        ("episode_return", "float32", (-1,)),
        ("episode_length", "int32", (-1,)),
        ("episode_env", "int32", (-1,)),
    ]
    payload.check(message(payload))


def test_a_gradient_of_another_length_is_refused(vector_env):
    """An actor with another network is refused before any gradient is added."""
    payload = payload_of(vector_env)
    with pytest.raises(ProtocolError, match=r"array gradient: found float32 \[3\], wanted float32 \[") as raised:
        check_schema(message(payload, gradient=np.zeros(3, np.float32)).arrays, payload.schema)
    assert raised.value.reason == DropReason.SCHEMA


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_bfloat16_that_is_not_finite_is_refused(vector_env, bits):
    """Infinity and NaN of either sign, which an integer array hides from the check of floats."""
    payload = payload_of(vector_env, "bf16")
    broken = message(payload).arrays["gradient"].copy()
    broken[5] = bits
    with pytest.raises(ProtocolError, match=rf"array gradient at \[5\]: found bfloat16 {bits:#06x}, wanted finite") as raised:
        payload.check(message(payload, gradient=broken))
    assert raised.value.reason == DropReason.NON_FINITE


def test_the_largest_finite_bfloat16_is_taken(vector_env):
    """The check must not refuse what is merely large."""
    payload = payload_of(vector_env, "bf16")
    payload.check(message(payload, gradient=np.full_like(message(payload).arrays["gradient"], 0x7F7F)))


def test_a_gradient_of_more_env_steps_than_a_rollout_has_is_refused(vector_env):
    """They are its weight: one actor could outvote all others."""
    payload = payload_of(vector_env)
    with pytest.raises(ProtocolError, match="env steps of a gradient: found 9, wanted at most 8") as raised:
        payload.check(message(payload, env_steps=9))
    assert raised.value.reason == DropReason.SCHEMA


# --- both sides ---


MODEL = ModelSettings(conv=((4, 4, 2),), hidden=(16,))
NO_PARTS = (0.0,) * len(LOSS_PARTS)
CONTEXT = WorkerContext(index=0, workers=2, num_envs=2)


def make_policy(env, *, precision="fp32", model=MODEL, **settings):
    """An actor that holds the policy of `published`."""
    section = A3CGradSettings(**settings)
    made = GradientPolicy(settings=section, model=model, env=env, precision=precision, seed=3, context=CONTEXT)
    made.load(4, published(env, model), env_steps=0)
    return made


def published(env, model=MODEL):
    """Parameters of a policy that prefers some actions."""
    net = nets.build_actor_critic(model, env, seed=1)
    torch.nn.init.orthogonal_(net.policy_head.weight, generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(snapshot.flatten(net, "fp32"))


def learner(env, *, model=MODEL, **settings):
    """A learner that has just published it."""
    made = A3CGrad(settings=A3CGradSettings(**settings), model=model, env=env, seed=0)
    snapshot.load(made.model, published(env, model))
    return made


def joined_gradient(env, samples, **settings):
    """The gradient of the mean loss over all rollouts as one batch, taken apart from any actor."""
    net = nets.build_actor_critic(MODEL, env)
    snapshot.load(net, published(env))
    batch, section = collate(samples, env), A3CGradSettings(**settings).for_actions(discrete=env.action.discrete)
    seen = network_outputs(net, batch, moments=Moments(), precision="fp32")
    made = gae(**return_inputs(batch, seen, clip_reward=False), gamma=section.gamma, lambda_=section.gae_lambda)
    single_pass_loss(section, batch, seen, made, made.target, entropy_coef=section.entropy_coef).total.backward()
    return snapshot.flatten_gradient(net, "fp32")


def test_a_state_with_values_in_other_units_is_read_in_units_of_return(vector_env):
    """As of PPO, with which the run began: actors compute the loss of returns."""
    algorithm = learner(vector_env)
    head = algorithm.model.value_head
    before = head.weight.detach().clone()
    moments = Moments.of(torch.tensor([2.0, 6.0], dtype=torch.float64))
    algorithm.load_state_dict(algorithm.state_dict() | {"value_moments": asdict(moments)})
    torch.testing.assert_close(head.weight, before * moments.std.float())
    torch.testing.assert_close(head.bias, torch.full_like(head.bias, 4.0))
    assert algorithm.state_dict()["value_moments"]["count"] == 0


def held(algorithm):
    """The gradient that the learner's parameters hold."""
    return snapshot.flatten_gradient(algorithm.model, "fp32")


def update(algorithm, *samples, version=4, env_steps=0):
    """One update at a version, in a run of 1000 env steps."""
    progress = RunProgress(env_steps=env_steps, env_steps_planned=1000, version=version)
    return algorithm.update(algorithm.ingest(samples), progress)


def gradient(values, *, version=4, env_steps=8, parts=NO_PARTS):
    """A message as the queue hands it over."""
    arrays = {"gradient": np.asarray(values), "loss_parts": np.array(parts, np.float32)}
    for array in arrays.values():
        array.setflags(write=False)
    return Experience(version=version, env_steps=env_steps, arrays=arrays)


def rollouts(env, make_sample):
    """Three rollouts of different width, with ends and reset rows, hence of 8, 10 and 3 env steps."""
    valid, ends = np.ones((4, 3), bool), np.zeros((4, 3), bool)
    ends[1, 0], valid[2, 0], ends[2, 1], valid[3, 1] = True, False, True, False
    return [
        make_sample(env, seed=1, reward=np.eye(4)[:, :2], action=np.arange(8).reshape(4, 2) % 4),
        make_sample(env, seed=2, num_envs=3, reward=np.eye(4)[:, :3], valid=valid, truncated=ends),
        make_sample(env, seed=3, num_envs=1, reward=np.ones((4, 1)), terminated=[[0], [0], [1], [0]], valid=[[1], [1], [1], [0]]),
    ]


def test_a_falling_entropy_bonus_is_that_of_the_snapshot_that_acts(image_env, make_sample):
    """An actor knows how far the run is from its snapshots: halfway from 0.4 to 0.2 its gradient is that of a constant 0.3."""
    sample = rollouts(image_env, make_sample)[0]
    falling = make_policy(image_env, entropy_coef=0.4, entropy_final=0.2, entropy_env_steps=500)
    falling.load(5, published(image_env), env_steps=250)
    sent = snapshot.to_tensor(falling.experience(sample.arrays)["gradient"]).numpy()
    np.testing.assert_allclose(sent, joined_gradient(image_env, [sample], entropy_coef=0.3), rtol=0.0, atol=1e-6)
    assert np.abs(sent - joined_gradient(image_env, [sample], entropy_coef=0.4)).max() > 1e-4


def test_the_average_of_gradients_is_the_gradient_of_the_joined_batch(image_env, make_sample):
    """The heart of it: three actors compute apart what one learner would have computed together, to 1e-6."""
    samples = rollouts(image_env, make_sample)
    policy = make_policy(image_env, entropy_coef=0.02, value_coef=0.7)
    sent = [Experience(version=4, env_steps=sample.env_steps, arrays=policy.experience(sample.arrays)) for sample in samples]
    assert [sample.env_steps for sample in sent] == [8, 10, 3]
    algorithm = learner(image_env, max_grad_norm=1e9)
    update(algorithm, *sent)
    wanted = joined_gradient(image_env, samples, entropy_coef=0.02, value_coef=0.7)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(held(algorithm), wanted, rtol=0.0, atol=1e-6)


def test_late_gradients_count_less(vector_env):
    """Lags 0, 1 and 3 with equal env steps: 4/7, 2/7 and 1/7."""
    model = ModelSettings(hidden=(4,))
    algorithm = learner(vector_env, model=model, max_grad_norm=1e9)
    size = len(held(algorithm))
    given = [gradient(np.full(size, value, np.float32), version=version) for value, version in ((7.0, 4), (70.0, 3), (700.0, 1))]
    result = update(algorithm, *given)
    np.testing.assert_allclose(held(algorithm), (4 * 7.0 + 2 * 70.0 + 700.0) / 7, rtol=1e-6)
    assert result.metrics["policy_lag_mean"] == pytest.approx(4 / 3)
    assert (result.samples, result.metrics["gradients"]) == (24, 3.0)


def test_loss_parts_are_averaged_as_the_gradients_are(vector_env):
    """The metrics are the loss of the joined rollouts."""
    algorithm = learner(vector_env)
    zeros = np.zeros(len(held(algorithm)), np.float32)
    metrics = update(
        algorithm, gradient(zeros, env_steps=2, parts=(1, 2, 3, 4)), gradient(zeros, env_steps=6, parts=(5, 6, 7, 8))
    ).metrics
    assert {name: metrics[name] for name in LOSS_PARTS} == pytest.approx(dict(zip(LOSS_PARTS, (4.0, 5.0, 6.0, 7.0), strict=True)))


def test_the_step_is_clipped_and_follows_the_schedule(vector_env):
    """The learner owns the only optimizer: norm, rate and weights are its own."""
    algorithm = learner(vector_env, optimizer="rmsprop", learning_rate=1e-2, lr_schedule="linear", max_grad_norm=0.5)
    before = snapshot.flatten(algorithm.model, "fp32")
    result = update(algorithm, gradient(np.full(len(before), 3.0, np.float32)), env_steps=250)
    assert result.metrics["grad_norm"] == pytest.approx(3.0 * np.sqrt(len(before)), rel=1e-5)
    assert result.metrics["learning_rate"] == pytest.approx(7.5e-3)
    assert np.linalg.norm(held(algorithm)) == pytest.approx(0.5, rel=1e-4)
    assert (snapshot.flatten(algorithm.model, "fp32") < before).all()


def test_bf16_on_the_wire_halves_the_bytes_and_rounds(image_env, make_sample):
    """The same gradient to 8 bits of mantissa; the learner adds up in float32."""
    rollout = rollouts(image_env, make_sample)[0].arrays
    exact, rounded = (
        make_policy(image_env, gradient_precision=precision).experience(rollout)["gradient"] for precision in ("fp32", "bf16")
    )
    assert (exact.dtype, rounded.dtype) == (np.float32, np.uint16)
    assert 2 * rounded.nbytes == exact.nbytes
    algorithm = learner(image_env, max_grad_norm=1e9)
    update(algorithm, gradient(rounded), gradient(rounded))
    np.testing.assert_allclose(held(algorithm), exact, rtol=2**-8, atol=1e-30)


def test_gradients_are_float32_also_where_acting_is_not(image_env, make_sample):
    """`actor.precision=bf16` makes acting fast; the weights that are differentiated are those of the snapshot."""
    rollout = rollouts(image_env, make_sample)[0].arrays
    sent = [make_policy(image_env, precision=precision).experience(rollout) for precision in ("fp32", "bf16")]
    np.testing.assert_array_equal(sent[0]["gradient"], sent[1]["gradient"])


def test_episodes_travel_with_the_gradient_and_nothing_else_of_the_rollout(vector_env, make_sample):
    """Returns are counted by the learner; observations stay with the actor."""
    rollout = make_sample(vector_env, episode_return=[3.0], episode_length=[7], episode_index=[5]).arrays
    sent = make_policy(vector_env, model=ModelSettings(hidden=(4,))).experience(rollout)
    assert set(sent) == {"gradient", "loss_parts", "episode_return", "episode_length", "episode_env"}
    assert [sent[name].tolist() for name in ("episode_return", "episode_length", "episode_env")] == [[3.0], [7], [1]]


def test_a_rollout_of_nothing_but_reset_rows_is_sent_and_weighs_nothing(vector_env, make_sample):
    """One environment, one step, and that was the reset: zeros, also after a rollout that had a gradient."""
    policy = make_policy(vector_env)
    policy.experience(make_sample(vector_env).arrays)
    sent = policy.experience(make_sample(vector_env, length=1, num_envs=1, valid=[[False]]).arrays)
    assert not sent["gradient"].any()
    assert not sent["loss_parts"].any()
    algorithm = learner(vector_env)
    before = snapshot.flatten(algorithm.model, "fp32")
    result = update(algorithm, gradient(sent["gradient"], env_steps=0))
    assert (result.samples, result.metrics) == (0, {})
    assert np.array_equal(snapshot.flatten(algorithm.model, "fp32"), before)


def test_a_sum_that_overflows_is_left_out_and_counted(vector_env):
    """Each number is finite, as admission checks, and their norm is not."""
    algorithm = learner(vector_env)
    before = snapshot.flatten(algorithm.model, "fp32")
    result = update(algorithm, gradient(np.full(len(before), 3e38, np.float32)))
    assert result.metrics["nonfinite_steps"] == 1
    assert "policy_loss" not in result.metrics
    assert np.array_equal(snapshot.flatten(algorithm.model, "fp32"), before)


def test_the_means_of_observations_are_part_of_the_buffer_and_never_moved(image_env, make_sample):
    """`normalize_observation`: their gradient is 0 on the wire, and they stay what calibration made them."""
    model = MODEL.model_copy(update={"normalize_observation": True})
    sent = make_policy(image_env, model=model).experience(rollouts(image_env, make_sample)[0].arrays)
    algorithm = learner(image_env, model=model)
    mean = algorithm.model.trunk.normalisation.mean.clone()
    update(algorithm, gradient(sent["gradient"]))
    assert torch.equal(algorithm.model.trunk.normalisation.mean, mean)
