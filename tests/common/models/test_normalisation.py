"""Normalisation of vectors: every component in its own scale, the same numbers in every process."""

from __future__ import annotations

import pytest
import torch

from common.envs.spec import ActionSpec, EnvSpec
from common.models import nets, snapshot
from common.models.arithmetic import CPU, autocast
from common.models.normalisation import ImageNormalisation, VectorNormalisation
from common.models.spec import ModelSettings

pytestmark = pytest.mark.pure

SCALES = torch.tensor([1e-3, 1.0, 50.0, 1e5, 1.0])
MEANS = torch.tensor([0.0, 1.0, -20.0, 3e6, 100_003.0])
STILL = 30_000.77  # in 16 binary digits it would be off by thousands of least deviations


def observations(count=2_000):
    """Five live components of very different scale and distance from 0, and one that never moves."""
    generator = torch.Generator().manual_seed(3)
    live = MEANS + SCALES * torch.randn(count, 5, generator=generator)
    return torch.cat([live, torch.full((count, 1), STILL)], dim=1)


@pytest.fixture
def normalisation():
    """It has the moments of `observations`."""
    made = VectorNormalisation((6,))
    made.set_moments(*moments(observations()))
    return made


def moments(values):
    """Mean and deviation, float64."""
    std, mean = torch.std_mean(values.double(), dim=0, correction=0)
    return mean, std


def test_every_live_component_gets_deviation_1_and_the_others_0(normalisation):
    """One divisor for all would be 2e5, and leave four of five below 0.001."""
    seen = normalisation(observations(), torch.float32)
    torch.testing.assert_close(seen[:, :5].std(0), torch.ones(5), atol=0.01, rtol=0.0)
    assert seen.mean(0).abs().max() < 0.01  # the mean is right to 2^-24 of itself
    assert not seen[:, 5].any()


def test_what_is_far_out_is_clipped_and_what_is_not_finite_stays_so(normalisation):
    """A simulator that explodes once does not blow up the network; NaN and infinity are still found."""
    far = torch.cat([MEANS + 1e6 * SCALES * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), torch.tensor([STILL + 1.0])])[None]
    assert normalisation(far, torch.float32).tolist() == [[10.0, -10.0, 10.0, -10.0, 10.0, 10.0]]
    for poison in (torch.nan, torch.inf, -torch.inf):
        assert normalisation(torch.full((1, 6), poison), torch.float32).isnan().all()


def test_a_snapshot_in_bfloat16_normalises_as_the_learner_does(normalisation):
    """Rounded, a mean of 100,003 would be off by hundreds of deviations. The cast of a whole network too."""
    worker = VectorNormalisation((6,))
    snapshot.load(worker, snapshot.flatten(normalisation, "bf16"))
    wanted = normalisation(observations(), torch.float32)
    assert torch.equal(worker(observations(), torch.float32), wanted)
    assert torch.equal(worker.bfloat16()(observations(), torch.bfloat16), wanted.bfloat16())


@pytest.mark.parametrize("stack", [1, 3])
def test_a_network_normalises_before_it_rounds(stack):
    """Acting and training in bfloat16: observations of 100,003 +- 1 stay different."""
    action = ActionSpec(choices=(2,), shape=())
    env = EnvSpec(observation_shape=(6,), observation_dtype="float32", action=action, frame_stack=stack, frame_skip=1)
    net = nets.build_actor_critic(ModelSettings(hidden=(16,), normalize_observation=True, shared_trunk=False), env)
    net.set_moments(*moments(observations()))
    frames = observations(64 * stack).view(64, *env.network_input_shape)
    exact = net(frames)
    with autocast("bf16", CPU):
        mixed = net(frames)
    for output in (mixed, net.bfloat16()(frames)):
        torch.testing.assert_close(output.value, exact.value, atol=5e-2, rtol=5e-2)
    assert exact.value.std() > 0.2


def test_an_image_of_numbers_far_from_0_is_the_same_to_learner_and_actors():
    """A depth camera, 3,000 +- 20: in bfloat16 its neighbours are 16 apart, and so were its mean image and its pixels."""
    frames = 3_000.0 + 20.0 * torch.randn(512, 8, 8, generator=torch.Generator().manual_seed(4))
    action = ActionSpec(choices=(2,), shape=())
    env = EnvSpec(observation_shape=(8, 8), observation_dtype="float32", action=action, frame_stack=1, frame_skip=1)
    learner, worker = ImageNormalisation(env), ImageNormalisation(env)
    learner.calibrate(frames)
    snapshot.load(worker, snapshot.flatten(learner, "bf16"))
    wanted = learner(frames, torch.float32)
    torch.testing.assert_close(wanted.std(), torch.tensor(0.5), atol=0.1, rtol=0.0)
    assert torch.equal(worker(frames, torch.float32), wanted)
    assert torch.equal(worker.bfloat16()(frames, torch.bfloat16), wanted.bfloat16())
