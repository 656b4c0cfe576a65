"""The base of learners with a replay memory: inserts, rate limit, warm-up, stopping, metrics and resuming."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import rookery
from common.algorithms.api import HasReplay, RunProgress
from common.algorithms.measures import NONFINITE_STEPS
from common.algorithms.off_policy import ReplayLearner
from common.algorithms.registry import build_algorithm
from common.algorithms.sections import ReplaySection
from common.algorithms.settings import DQNSettings, PQNSettings, TD3Settings
from common.errors import ConfigError, ResourceError
from common.models import snapshot
from common.models.spec import ModelSettings
from common.protocol.events import WorkerKey

WORKER = WorkerKey(name="a", incarnation=1)
ONE_STEP = {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 0.5}  # of 4 samples, after each message
pytestmark = pytest.mark.pure


class Counter(ReplayLearner):
    """Takes no steps, but notes the minibatches it got; every `bad`-th step is not finite."""

    def __init__(self, *, env, bad=0, **settings):
        defaults = {"replay_capacity": 1_000, "warmup": 0, "minibatch": 4, "samples_per_insert": 2.0}
        super().__init__(settings=ReplaySection(name="any", **(defaults | settings)), env=env, seed=0)
        self.seen, self._bad = [], bad

    def _networks(self):
        return {}

    def _optimizers(self):
        return {}

    def _gradient_step(self, rows):
        self.seen.append(rows.observation.copy())
        number = len(self.seen)
        left_out = torch.tensor(self._bad > 0 and number % self._bad == 0)
        measured = {"loss": torch.tensor(float(number)), NONFINITE_STEPS: left_out}
        return measured | ({"rare": torch.tensor(7.0)} if number % 2 == 0 else {})


def train(learner, *samples, version=0, **stop):
    """One update, as the learner's loop does it."""
    return learner.update(learner.ingest(samples), RunProgress(env_steps=0, env_steps_planned=1000, version=version), **stop)


def targets(learner):
    """All parameters of the target networks as one vector."""
    state = learner.state_dict()
    return torch.cat([parameter.flatten() for parameter in (state.get("target") or state["targets"]).values()])


def messages(make_sample, env, number, **shape):
    """Consecutive messages of one actor."""
    return [replace(make_sample(env, seed=seq, **shape), worker=WORKER, seq=seq) for seq in range(number)]


def test_gradient_steps_follow_the_env_steps_that_came_in(continuous_env, make_sample):
    """8 env steps a message, each to be used twice, in minibatches of 4: 4 gradient steps a message, from the first on."""
    learner = Counter(env=continuous_env)
    taken = [train(learner, message).metrics["gradient_steps"] for message in messages(make_sample, continuous_env, 5)]
    assert taken == [4.0] * 5


def test_the_learning_rate_is_measured_whether_or_not_a_step_was_taken(continuous_env, make_sample):
    """It may be a scaled one: the curve of a run says which it was."""
    learner = Counter(env=continuous_env, learning_rate=3e-3, warmup=1_000)
    assert train(learner, make_sample(continuous_env)).metrics["learning_rate"] == 3e-3


@pytest.mark.parametrize("ratio", [0.3, 1.0, 3.7, 20.0])
def test_the_ratio_is_met_within_one_minibatch_whatever_the_sizes_of_the_messages(continuous_env, make_sample, ratio):
    """Rollouts of several lengths and rows that are no env steps: what is measured is what was asked for, from below."""
    learner = Counter(env=continuous_env, samples_per_insert=ratio)
    inserted = 0
    for seq, length in enumerate((1, 5, 3, 8, 2)):
        valid = torch.ones(length, 2, dtype=torch.bool)
        valid[0, 0] = length < 4
        sample = make_sample(continuous_env, length=length, valid=valid.numpy())
        inserted += sample.env_steps
        train(learner, replace(sample, worker=WORKER, seq=seq))
        assert ratio * inserted - 4 < 4 * len(learner.seen) <= ratio * inserted + 1e-9


def test_during_the_warm_up_nothing_is_trained_and_afterwards_only_on_what_came_later(continuous_env, make_sample):
    """The warm-up fills the memory; it is no debt."""
    learner = Counter(env=continuous_env, warmup=20)
    taken = [train(learner, message) for message in messages(make_sample, continuous_env, 4)]
    assert [result.metrics["gradient_steps"] for result in taken] == [0.0, 0.0, 2.0, 4.0]
    assert "loss" not in taken[0].metrics
    assert [result.samples for result in taken] == [8] * 4


def test_a_stop_is_asked_for_before_each_step_and_the_rest_stays_owed(continuous_env, make_sample):
    """Told to end in the middle of a long update: it ends now; should it go on after all, nothing is lost."""
    learner = Counter(env=continuous_env)
    first, second = messages(make_sample, continuous_env, 2)
    answers = iter([False, True])
    assert train(learner, first, stop=lambda: next(answers)).metrics["gradient_steps"] == 1.0
    assert train(learner, second).metrics["gradient_steps"] == 7.0


def test_steps_that_are_not_finite_are_counted_and_paid_for(continuous_env, make_sample):
    """Otherwise bad numbers would make the run train more often on the others, or for ever."""
    learner = Counter(env=continuous_env, bad=2)
    metrics = train(learner, *messages(make_sample, continuous_env, 1)).metrics
    assert learner.state_dict()["gradient_steps"] == 2
    assert (metrics["gradient_steps"], metrics["nonfinite_steps"], metrics["samples_per_insert"]) == (2.0, 2.0, 2.0)
    assert metrics["loss"] == 2.0  # of steps 1 and 3
    assert "rare" not in metrics  # of steps 2 and 4


@pytest.mark.parametrize(
    "settings",
    [DQNSettings(**ONE_STEP, target_every=2), TD3Settings(**ONE_STEP, policy_delay=2)],
    ids=lambda settings: settings.name,
)
def test_targets_move_after_so_many_steps_that_were_taken(vector_env, continuous_env, make_sample, settings):
    """After each second one; of these five the second and the third are left out."""
    env = continuous_env if settings.name == "td3" else vector_env
    learner = build_algorithm(settings, model=ModelSettings(hidden=(8,)), env=env, seed=0)
    draw, moved = learner._replay.sample, []
    for message, reward in zip(messages(make_sample, env, 5), (1.0, np.nan, np.nan, 1.0, 1.0), strict=True):
        learner._replay.sample = lambda *given, reward=reward: replace(draw(*given), reward=np.full(4, reward, np.float32))
        before = targets(learner)
        train(learner, message)
        moved.append(not torch.equal(targets(learner), before))
    assert moved == [False, False, False, True, False]


def test_a_metric_is_the_mean_over_the_steps_that_measured_it(continuous_env, make_sample):
    """The delayed actor has a loss only now and then."""
    metrics = train(Counter(env=continuous_env), *messages(make_sample, continuous_env, 1), version=3).metrics
    assert metrics["loss"] == 2.5
    assert metrics["rare"] == 7.0
    assert metrics["policy_lag_mean"] == 3.0


def test_a_resumed_run_warms_up_anew(continuous_env, make_sample):
    """Its memory is empty."""
    first, second = (Counter(env=continuous_env, warmup=8) for _ in range(2))
    one, two = messages(make_sample, continuous_env, 2)
    train(first, one)
    second.load_state_dict(first.state_dict())
    assert [train(learner, two).metrics["gradient_steps"] for learner in (first, second)] == [4.0, 0.0]


def test_the_state_of_another_algorithm_with_the_same_network_is_refused_and_changes_nothing(vector_env):
    """A run of PQN that is resumed with DQN: its checkpoint is no damaged one."""
    model = ModelSettings(hidden=(8,))
    other = build_algorithm(PQNSettings(dueling=True), model=model, env=vector_env, seed=1)
    learner = build_algorithm(DQNSettings(**ONE_STEP), model=model, env=vector_env, seed=0)
    before = snapshot.flatten(learner.model, "fp32")
    with pytest.raises(ResourceError, match="another algorithm: found no optimizer adam; resume with the algorithm settings"):
        learner.load_state_dict(other.state_dict())
    assert np.array_equal(snapshot.flatten(learner.model, "fp32"), before)


def test_the_memory_says_how_large_it_is(continuous_env):
    """Printed at the start of a run: it is allocated at once."""
    learner = Counter(env=continuous_env, replay_capacity=500)
    assert isinstance(learner, HasReplay)
    assert learner.replay_env_steps >= 500
    assert learner.replay_bytes > 500 * 2 * 4


def test_the_share_of_incomplete_blocks_is_in_the_metrics(continuous_env, make_sample):
    """The learner warns by it, and `rookery doctor` finds it."""
    learner = Counter(env=continuous_env)
    metrics = [train(learner, message).metrics for message in messages(make_sample, continuous_env, 1)]
    assert metrics[-1]["replay_incomplete"] == 2 / learner._replay.layout.blocks  # of the two environments


def test_a_memory_that_cannot_be_is_refused_when_the_learner_is_built(image_env):
    """Too small for the stacks of its environments."""
    with pytest.raises(ConfigError, match="replay_capacity"):
        Counter(env=image_env, replay_capacity=4)


@pytest.mark.parametrize(("terminated", "taken"), [(0, 3.0), (1, 1.0)])
def test_windows_shorter_than_asked_for_are_measured(continuous_env, make_sample, terminated, taken):
    """n_step 3 where every episode lasts one step: nobody could know before, so the mean length of the windows is measured."""
    learner = Counter(env=continuous_env, n_step=3)
    ends = {"terminated": np.full((8, 2), terminated)}
    metrics = [train(learner, message).metrics for message in messages(make_sample, continuous_env, 2, length=8, **ends)]
    assert metrics[-1]["window_env_steps"] == taken
    warming = Counter(env=continuous_env, warmup=100)
    assert "window_env_steps" not in train(warming, *messages(make_sample, continuous_env, 1)).metrics


class OwnModule(rookery.ReplayLearner):
    """As a user's package writes it: values of actions by a plain torch module, from public names alone."""

    def __init__(self, *, settings, env, seed):
        super().__init__(settings=settings, env=env, seed=seed)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(env.observation_shape[0], env.action.n))
        self._adam = rookery.build_optimizer("adam", self.model, lr=settings.learning_rate, eps=1e-8)

    def _networks(self):
        return {"parameters": self.model}

    def _optimizers(self):
        return {"adam": (self._adam, self.model)}

    def _gradient_step(self, rows):
        values = self.model(torch.from_numpy(rows.observation))
        with torch.no_grad():
            following = self.model(torch.from_numpy(rows.next_observation)).amax(1)
        reward, discount = torch.from_numpy(rows.reward), torch.from_numpy(rows.discount)
        target = rookery.td_target(reward=reward, discount=discount, value=following)
        chosen = values.gather(1, torch.from_numpy(rows.action)[:, None]).squeeze(1)
        loss = rookery.value_loss(value=chosen, target=target)
        norm = rookery.gradient_step(self._adam, self.model, loss, lr=self._learning_rate, max_grad_norm=1.0)
        return {"loss": loss.detach(), rookery.NONFINITE_STEPS: norm.isnan()}


class OwnPolicy(rookery.NetworkPolicy):
    """Acts by such a module, again by public names alone."""

    def __init__(self, env):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(env.observation_shape[0], env.action.n))
        super().__init__(net, precision="fp32", seed=0)

    @torch.inference_mode()
    def act(self, observation, *, greedy=False):  # noqa: ARG002
        return {"action": self.network(observation).argmax(1)}


def test_a_policy_of_ones_own_acts_by_the_parameters_of_a_plain_module(vector_env):
    learner, policy = OwnModule(settings=DQNSettings(name="dqn"), env=vector_env, seed=0), OwnPolicy(vector_env)
    policy.load(7, torch.from_numpy(snapshot.flatten(learner.model, "fp32")), env_steps=0)
    observation = torch.randn(5, *vector_env.observation_shape)
    assert torch.equal(policy.act(observation)["action"], learner.model(observation).argmax(1))
    assert policy.layout == snapshot.ParameterLayout.of(learner.model).fingerprint


def test_a_learner_of_ones_own_may_train_a_plain_module(vector_env, make_sample):
    """The loop begins the normalisation, trains, lets it follow the experience, and saves; a plain module has none of ours."""
    settings = ReplaySection(name="own:ENTRY", replay_capacity=1_000, warmup=0, minibatch=4, samples_per_insert=2.0)
    learner, second = (OwnModule(settings=settings, env=vector_env, seed=seed) for seed in (0, 1))
    learner.calibrate(torch.rand(20, *vector_env.observation_shape))
    (message,) = messages(make_sample, vector_env, 1)
    metrics = train(learner, message).metrics
    learner.observe([message])
    assert (metrics["gradient_steps"], metrics["nonfinite_steps"]) == (4.0, 0.0)
    second.load_state_dict(learner.state_dict())
    assert all(torch.equal(*pair) for pair in zip(learner.model.parameters(), second.model.parameters(), strict=True))
