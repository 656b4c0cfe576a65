"""Sections of the configuration: settings that cannot work with the run they are in."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from common.algorithms.sections import ReplaySection, RunScale
from common.algorithms.settings import (
    A3CGradSettings,
    A3CSettings,
    DQNSettings,
    ImpalaSettings,
    PPOSettings,
    PQNSettings,
    SACSettings,
    TD3Settings,
)
from common.conditions import contradictions
from common.config.schema import Settings
from common.config.sections import RolloutSettings, TargetSettings

pytestmark = pytest.mark.pure

SINGLE_PASS = [A3CSettings, A3CGradSettings, ImpalaSettings]
ACTOR_CRITIC = [*SINGLE_PASS, PPOSettings]
SECTIONS = [*ACTOR_CRITIC, PQNSettings, DQNSettings, TD3Settings, SACSettings]

SCALE = RunScale(length=20, num_envs=8, batch=2, credits=2, max_policy_lag=20, actors=8, env_steps=100_000)
REPLAY_SCALE = RunScale(length=16, num_envs=4, batch=1, credits=2, max_policy_lag=20, actors=2, env_steps=100_000)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_defaults_fit_together(section):
    assert list(section().conflicts(SCALE)) == []


# --- the learning rate ---


@pytest.mark.parametrize("section", SINGLE_PASS)
def test_an_adaptive_rate_is_refused_where_an_update_is_one_step(section):
    with pytest.raises(ValidationError, match="'constant' or 'linear'"):
        section(lr_schedule="kl_adaptive")


def test_an_adaptive_rate_outside_its_bounds_is_refused():
    with pytest.raises(ValidationError, match=r"learning_rate 0.1 is outside 1e-06..0.01, where kl_adaptive would move it"):
        PPOSettings(lr_schedule="kl_adaptive", learning_rate=0.1)
    assert PPOSettings(lr_schedule="constant", learning_rate=0.1).learning_rate == 0.1


@pytest.mark.parametrize(
    ("epochs", "minibatch", "num_envs", "memory", "refused"),
    [(1, 64, 4, False, True), (2, 64, 4, False, False), (1, 32, 4, False, False), (1, 8, 1, False, False), (1, 8, 1, True, True)],
)
def test_an_adaptive_rate_needs_two_gradient_steps(epochs, minibatch, num_envs, memory, refused):
    """Of one alone the KL divergence, which is measured before it, is always 0, and the rate would rise to its bound."""
    scale = SCALE._replace(length=16, num_envs=num_envs, batch=1, memory=memory)
    found = list(PPOSettings(lr_schedule="kl_adaptive", epochs=epochs, minibatch=minibatch).conflicts(scale))
    assert [sentence.partition(",")[0] for sentence in found] == ["algorithm.lr_schedule: found kl_adaptive"] * refused


# --- on-policy ---


@pytest.mark.parametrize("section", [PPOSettings, PQNSettings])
def test_minibatches_of_whole_environments_have_a_note_where_less_was_asked_for(section):
    (note,) = section(minibatch=15).notes_on(SCALE._replace(length=16, memory=True))
    assert note.startswith("algorithm.minibatch: found 15, and minibatches have at least rollout.length 16 env steps")
    assert not [*section(minibatch=16).notes_on(SCALE._replace(length=16, memory=True))]
    assert not [*section(minibatch=15).notes_on(SCALE._replace(length=16))]


@pytest.mark.parametrize(
    ("section", "batch", "refused"), [(A3CSettings, 1, True), (A3CSettings, 2, False), (A3CGradSettings, 2, True)]
)
def test_one_advantage_alone_cannot_be_standardised(section, batch, refused):
    """One env step a loss: of a batch by data, of a message by gradients."""
    settings = section(normalize_advantage=True)
    sentences = list(settings.conflicts(SCALE._replace(length=1, num_envs=1, batch=batch)))
    assert bool(sentences) == refused
    assert all(sentence.startswith("algorithm.normalize_advantage: found true, wanted false") for sentence in sentences)


@pytest.mark.parametrize("section", ACTOR_CRITIC)
@pytest.mark.parametrize(("discrete", "chosen"), [(True, 0.01), (False, 0.0)])
def test_the_entropy_bonus_follows_the_kind_of_action_unless_it_is_set(section, discrete, chosen):
    """The noise of a Gaussian explores by itself."""
    assert section().for_actions(discrete=discrete).entropy_coef == chosen
    assert section(entropy_coef=0.2).for_actions(discrete=discrete).entropy_coef == 0.2


@pytest.mark.parametrize(("c_clip", "found"), [(1.5, "1.5"), (None, "null")])
def test_impala_refuses_a_c_clip_above_its_rho_clip(c_clip, found):
    (sentence,) = problems(SCALE, section=ImpalaSettings, c_clip=c_clip)
    assert sentence.startswith(f"algorithm.c_clip: found {found}, wanted at most 1.0 = algorithm.rho_clip: ")
    assert problems(SCALE, section=ImpalaSettings, c_clip=c_clip, rho_clip=None) == []


def test_a3c_refuses_a_ratio_clip_that_would_shrink_fresh_experience():
    """With experience of the newest policy every ratio is 1."""
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        A3CSettings(ratio_clip=0.9)


# --- off-policy ---


def problems(scale=REPLAY_SCALE, *, section=ReplaySection, **settings):
    """The conflicts of a section with a run of two actors."""
    own = section(**({"name": "any"} if section is ReplaySection else {}), **settings)
    run = Settings().model_copy(
        update={
            "algorithm": own,
            "rollout": RolloutSettings(length=scale.length),
            "target": TargetSettings(env_steps=scale.env_steps),
        }
    )
    return [*contradictions(run, lambda _: "any", files=(), begun=False, strict=False)[0], *own.conflicts(scale)]


@pytest.mark.parametrize("section", [ReplaySection, DQNSettings, TD3Settings, SACSettings])
def test_a_minibatch_must_fit_into_the_memory(section):
    (problem,) = problems(section=section, replay_capacity=1_000, warmup=0, minibatch=1_001)
    assert problem.startswith("algorithm.minibatch: found 1001, wanted at most 1000 = algorithm.replay_capacity")


def test_a_warm_up_must_fit_into_the_memory():
    (problem,) = problems(replay_capacity=1_000, warmup=1_001)
    assert problem.startswith("algorithm.warmup: found 1001, wanted at most 1000 = algorithm.replay_capacity")


def test_an_insert_must_fit_into_the_memory():
    (problem,) = problems(REPLAY_SCALE._replace(length=512), replay_capacity=2_000)
    assert problem.startswith("algorithm.replay_capacity: found 2000, wanted at least 2048 = learner.batch 1 x rollout.length")


@pytest.mark.parametrize(("warmup", "ratio"), [(99_990, 3.1), (0, 0.0003)])
def test_a_run_must_pay_for_at_least_one_gradient_step(warmup, ratio):
    """A warm-up nearly as long as the budget, or a ratio so small that the run ends first."""
    (problem,) = problems(warmup=warmup, samples_per_insert=ratio)
    assert problem.startswith(f"algorithm.samples_per_insert: found {ratio:g}, wanted more")
    assert f"algorithm.warmup {warmup}" in problem


@pytest.mark.parametrize("warmup", [5_000, 5_001])
def test_a_run_that_ends_in_its_warm_up_is_refused_with_all_that_is_too_long_for_it(warmup):
    """No ratio would pay for a gradient step."""
    scale = REPLAY_SCALE._replace(env_steps=5_000, actors=1)
    first, second = problems(scale, section=TD3Settings, warmup=warmup, random_env_steps=5_000)
    assert first.startswith(f"algorithm.warmup: found {warmup}, wanted less than 5000 = target.env_steps: ")
    assert second.startswith("algorithm.random_env_steps: found 5000, wanted less than 5000 = target.env_steps: ")


def test_a_gradient_step_of_ranks_takes_a_minibatch_of_each():
    sizes = {"warmup": 99_900, "minibatch": 64, "samples_per_insert": 1.0}
    assert problems(**sizes) == []
    (problem,) = problems(REPLAY_SCALE._replace(ranks=2), **sizes)
    assert problem.endswith("pay for 100 samples, and one gradient step takes algorithm.minibatch 64 x learner.ranks 2")


def test_messages_must_not_become_stale_while_they_wait():
    """The learner is slower than its actors by design: credits x actors messages wait, each for one update."""
    (problem,) = problems(REPLAY_SCALE._replace(actors=11))
    assert problem.startswith("learner.max_policy_lag: found 20, wanted at least 22 = learner.credits x actor.count")
    assert problems(REPLAY_SCALE._replace(actors=10)) == []
    assert problems(REPLAY_SCALE._replace(actors=11, batch=2)) == []


def test_a_first_minibatch_must_have_enough_to_be_drawn_from():
    """1,024 transitions drawn from 138 would show each of them some eight times."""
    (problem,) = problems(warmup=10, minibatch=1_024)
    assert problem.startswith("algorithm.warmup: found 10, wanted at least 1024 = algorithm.minibatch")
    assert "drawn from 138 env steps" in problem
    assert problems(warmup=1_024, minibatch=1_024) == problems(warmup=0, minibatch=64) == []
    assert problems(warmup=0, minibatch=1_024, samples_per_insert=1.0) == []


@pytest.mark.parametrize(
    ("scale", "warmup", "minibatch", "wanted"),
    [
        ({"num_envs": 1, "actors": 8}, 128, 128, 256),  # of message 9 on, when one rollout has a successor
        ({"num_envs": 1, "actors": 8, "ranks": 2}, 256, 128, 512),
        ({"num_envs": 1, "actors": 0}, 128, 128, 144),  # how many there are is not known: one at least
        ({"num_envs": 1, "actors": 8}, 256, 128, None),
        ({"num_envs": 8, "actors": 8}, 0, 128, None),  # the rollouts of one message are enough
        ({"num_envs": 1, "actors": 8, "batch": 32}, 0, 256, None),  # 24 of 32 rollouts have a successor after the first batch
        ({"num_envs": 1, "actors": 8, "batch": 32}, 0, 512, 640),
    ],
)
def test_with_memory_the_newest_rollouts_are_not_drawn_from(scale, warmup, minibatch, wanted):
    """The first minibatch of 8 sequences was one sequence 8 times."""
    sizes = {"warmup": warmup, "minibatch": minibatch, "samples_per_insert": 128.0, "section": DQNSettings}
    found = problems(REPLAY_SCALE._replace(memory=True, **scale), **sizes)
    if wanted is None:
        assert found == []
    else:
        assert found[0].startswith(f"algorithm.warmup: found {warmup}, wanted at least {wanted} = algorithm.minibatch")
        assert problems(REPLAY_SCALE._replace(memory=True, **scale), **(sizes | {"warmup": wanted})) == []


def test_the_first_minibatch_of_each_rank_is_drawn_from_what_it_received():
    """The warm-up counts the env steps of all ranks, of which each holds its share."""
    sizes = {"warmup": 1_024, "minibatch": 1_024}
    (problem,) = problems(REPLAY_SCALE._replace(ranks=2), **sizes)
    assert problem.startswith("algorithm.warmup: found 1024, wanted at least 2048 = algorithm.minibatch x learner.ranks 2")
    assert "drawn from 640 env steps" in problem
    assert problems(REPLAY_SCALE._replace(ranks=2), warmup=2_048, minibatch=1_024) == []


def test_a_window_longer_than_a_rollout_is_refused():
    (problem,) = problems(n_step=20)
    assert problem.startswith("algorithm.n_step: found 20, wanted at most 16 = rollout.length")
    assert problems(n_step=16) == []


@pytest.mark.parametrize(
    ("scale", "least"), [({}, 1_280), ({"frame_stack": 4}, 1_760), ({"actors": 9}, 2_880), ({"num_envs": 64, "actors": 0}, 1_280)]
)
def test_a_memory_without_room_for_the_windows_of_each_environment_is_refused(scale, least):
    """It is laid out for 16 environments at least; how many there are is not known where all actors start elsewhere."""
    scale, sizes = REPLAY_SCALE._replace(**scale), {"n_step": 8, "minibatch": 8, "warmup": 0}
    (problem,) = problems(scale, replay_capacity=least - 1, **sizes)
    assert problem.startswith(f"algorithm.replay_capacity: found {least - 1}, wanted at least {least}: 10 blocks of ")
    assert problems(scale, replay_capacity=least, **sizes) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"minibatch": 40}, "algorithm.minibatch: found 40, wanted a multiple of 16 = rollout.length: "),
        ({"burn_in": 14}, "algorithm.burn_in: found 14, wanted at most 13 = rollout.length 16 less algorithm.n_step 3: "),
        (
            {"replay_capacity": 5_119},
            "algorithm.replay_capacity: found 5119, wanted at least 5120: 10 rollouts of 16 for each of 32 ",
        ),
    ],
)
def test_what_does_not_fit_the_sequences_of_a_network_with_memory_is_refused(wrong, problem):
    """One actor counts where all start elsewhere: their number is not known."""
    fits = {"minibatch": 32, "burn_in": 13, "replay_capacity": 5_120, "warmup": 0}
    for scale in (REPLAY_SCALE._replace(num_envs=16), REPLAY_SCALE._replace(num_envs=32, actors=0)):
        assert list(DQNSettings(**fits | wrong).conflicts(scale)) == []
        assert list(DQNSettings(**fits).conflicts(scale._replace(memory=True))) == []
        (found,) = DQNSettings(**fits | wrong).conflicts(scale._replace(memory=True))
        assert found.startswith(problem)


@pytest.mark.parametrize("switch", ["double", "dueling"])
def test_each_switch_of_dqn_works_by_itself(switch):
    assert problems(section=DQNSettings, **{switch: True}) == problems(section=DQNSettings, **{switch: False}) == []


@pytest.mark.parametrize(
    "wrong",
    [{"n_step": 0}, {"epsilon": -0.1}, {"target_rate": 0.0}, {"huber": 0.0}],
)
def test_a_value_outside_its_range_is_refused_by_name(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        DQNSettings(**wrong)


@pytest.mark.parametrize("section", [TD3Settings, SACSettings])
def test_the_defaults_for_continuous_actions_take_one_gradient_step_per_env_step(section):
    assert section().samples_per_insert == section().minibatch


@pytest.mark.parametrize("section", [TD3Settings, SACSettings])
def test_a_run_that_ends_before_its_policy_acts_is_refused(section):
    """A short trial with the random phase of a long run."""
    (problem,) = problems(REPLAY_SCALE._replace(env_steps=5_000, actors=1), section=section, random_env_steps=5_000, warmup=256)
    assert problem.startswith("algorithm.random_env_steps: found 5000, wanted less than 5000 = target.env_steps")
