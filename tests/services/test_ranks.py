"""Whole runs of a learner of several ranks, each with actors of its own, in threads."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace

import pytest
import torch

from common.algorithms.registry import build_algorithm
from common.config.load import load_settings
from common.config.schema import Settings
from common.config.sections import ActorSettings, CheckpointSettings, RunSettings
from common.envs.trial import spec_of
from common.protocol.ledger import sum_counts
from common.runtime.checkpoints import CheckpointStore
from common.runtime.run_directory import RunDirectory
from services.learner import resume, startup
from services.learner.rates import PolicyLag
from tests.ranks import on_every_rank
from tests.services.test_lockstep import held_up, recipe
from tests.services.test_whole_run import Colony

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("one_torch_thread")]

RANKS = 2
TIMELESS = ("learner_updates", "env_steps", "episodes", "mean100", "parameters_sha256", "reproducible")


def of_ranks(settings, *, mode="lockstep", ranks=RANKS, **sections):
    """The same run by several ranks with two actors each."""
    learner = settings.learner.model_copy(update={"ranks": ranks})
    changed = {"run": RunSettings(mode=mode), "actor": ActorSettings(count=2 * ranks), "learner": learner} | sections
    return Settings(**{name: getattr(settings, name) for name in Settings.model_fields} | changed)


def trained(settings, folder, *, delays=1, actors=(2, 2), killed=()):
    """The finished colony of each rank of a whole run; `killed`: updates before which all ranks are killed."""

    def on_rank(ranks):
        colony = Colony(settings, folder / str(ranks.index), group=ranks)
        colony.alive = held_up(delays + 10 * ranks.index)
        colony.learner_kills, colony.saves = list(killed), lambda: True
        run = colony.run(actors=actors[ranks.index], evaluator=ranks.index == 0)
        ledger = run.stats.ledger
        assert (ledger["queued"], ledger["in_flight"]) == (0, 0)
        assert ledger["produced"] == ledger["trained"] + sum(ledger["dropped"].values())
        return run, run.record.summary(run.stats, now=time.monotonic())

    return on_every_rank(len(actors), on_rank)


def timeless(runs):
    return [{name: summary[name] for name in TIMELESS} for _, summary in runs]


@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_two_ranks_in_lockstep_end_twice_with_the_same_weights(tmp_path, algorithm):
    settings = of_ranks(recipe(algorithm))
    first = trained(settings, tmp_path / "1", delays=1)
    second = trained(settings, tmp_path / "2", delays=2)
    assert timeless(first) == timeless(second)
    one, other = timeless(first)
    assert one == other
    assert one["reproducible"]
    assert one["learner_updates"] > 3
    ledger = sum_counts([run.stats.ledger for run, _ in first])
    assert ledger["trained"] == one["env_steps"]
    assert ledger["produced"] == sum(actor.stats.env_steps for run, _ in first for actor in run.actors)


def test_killed_ranks_continue_bit_for_bit_from_their_checkpoints(tmp_path):
    settings = of_ranks(recipe("dqn"), checkpoint=CheckpointSettings(every_seconds=1e-9, replay=True))
    alone = trained(settings, tmp_path / "alone")
    disturbed = trained(settings, tmp_path / "killed", delays=3, killed=(0, 2, 4))
    assert timeless(disturbed) == timeless(alone)


def test_a_rank_without_actors_delays_no_other(tmp_path):
    (busy, one), (idle, other) = trained(of_ranks(recipe("ppo"), mode="asynchronous"), tmp_path, actors=(2, 0))
    assert one["parameters_sha256"] == other["parameters_sha256"]
    assert busy.reason == idle.reason == "env step budget spent"
    assert idle.stats.ledger["trained"] == 0
    assert busy.stats.ledger["trained"] == one["env_steps"] == other["env_steps"]
    for stats in (busy.train_stats, idle.train_stats):
        assert 0 < stats.ranks_wait_seconds <= sum(stats.phases.seconds().values())
        assert stats.all_reduce_seconds() >= one["learner_updates"]


def resumed(settings, folder, count, *, of=None):
    """Record, weights and ledger with which `count` ranks continue the runs in `folder`; or what `of` finds."""

    def on_rank(ranks):
        directory = RunDirectory(folder / str(ranks.index) / "run")
        loaded = load_settings(preset=None, overrides=(), environ={})
        invocation = startup.Invocation(
            loaded=replace(loaded, settings=of_ranks(settings, ranks=count)),
            run_dir=directory.path,
            resume=True,
            run_lock=None,
            config_named=False,
            linger=False,
            debug=False,
        )
        env = spec_of(settings.env)
        algorithm = build_algorithm(settings.algorithm, model=settings.model, env=env, seed=ranks.index, ranks=ranks)
        record, session = resume.open_state(
            invocation,
            directory,
            algorithm=algorithm,
            env=env,
            store=CheckpointStore(directory.checkpoints, keep=2),
            group=ranks if count > 1 else None,
        )
        if of is not None:
            return of(algorithm, session)
        weights = torch.cat([each.detach().flatten() for each in algorithm.model.parameters()])
        return record, weights, session.ledger.as_dict()

    return on_every_rank(count, on_rank)


def test_ranks_keep_random_streams_of_their_own_where_their_number_changes(tmp_path):
    settings = of_ranks(recipe("td3"))
    trained(settings, tmp_path)
    first, *others = resumed(settings, tmp_path, 3, of=lambda algorithm, _: algorithm.state_dict())
    for other in others:
        assert other["replay_rng"] != first["replay_rng"]
        assert not torch.equal(other["generator"], first["generator"])
    assert others[0]["replay_rng"] != others[1]["replay_rng"]


def test_another_number_of_ranks_continues_with_the_weights_ledgers_and_policy_lag_of_all(tmp_path):
    settings = of_ranks(recipe("ppo"))
    runs = trained(settings, tmp_path)
    ledger = sum_counts([run.stats.ledger for run, _ in runs])
    for count in (2, 3, 1):
        continued = resumed(settings, tmp_path, count)
        for record, weights, _ in continued:
            assert record.version == runs[0][0].record.version
            torch.testing.assert_close(weights, continued[0][1], rtol=0, atol=0)
        found = sum_counts([ledger for _, _, ledger in continued])
        assert found["trained"] == ledger["trained"]
        assert found["produced"] == ledger["produced"]
        assert found["produced"] == found["trained"] + found["in_flight"] + sum(found["dropped"].values())
        lag = PolicyLag.of_ranks(record.lag for record, _, _ in continued)
        assert lag.env_steps == ledger["trained"]
        assert lag == PolicyLag.of_ranks(run.record.lag for run, _ in runs)


def test_where_the_number_of_ranks_changes_no_worker_repeats_the_random_streams_of_the_beginning(tmp_path):
    """Each slot began again with its first generation, and with it the levels and the noise of the first actors."""
    settings, _ = saved_by_two_ranks(tmp_path)
    for count in (3, 1):
        registries = resumed(settings, tmp_path, count, of=lambda _, session: session.saved.accounts()["registry"])
        slots = {(role, index): number for each in registries for role, index, number in each["generations"]}
        assert min(slots.values()) > 2
        assert {("actor", 0), ("evaluator", 0)} <= set(slots)


def saved_by_two_ranks(folder):
    """Settings of a run by two ranks in `folder`, of which each has its newest two checkpoints."""
    settings = of_ranks(recipe("ppo"), checkpoint=CheckpointSettings(every_seconds=1e-9))
    trained(settings, folder, killed=(2,))  # ranks that are killed write checkpoints
    return settings, [RunDirectory(folder / str(rank) / "run") for rank in range(2)]


def test_ranks_continue_from_an_older_version_where_one_of_them_lacks_the_newest(tmp_path):
    """The learner was killed after rank 1 had written its checkpoint, and before rank 0 had."""
    settings, (first, second) = saved_by_two_ranks(tmp_path)
    older, newest = (int(path.name.rpartition("-")[2]) for path in sorted(first.checkpoints.glob("checkpoint-*")))
    shutil.rmtree(first.checkpoints / f"checkpoint-{newest:012d}")
    continued = resumed(settings, tmp_path, 2)
    assert [record.version for record, _, _ in continued] == [older, older]
    torch.testing.assert_close(continued[0][1], continued[1][1], rtol=0, atol=0)
    assert all(ledger["trained"] > 0 for _, _, ledger in continued)  # the sessions of both go on
    assert (second.checkpoints / f"checkpoint-{newest:012d}").exists()


def test_accounts_of_sessions_that_ended_with_another_number_of_ranks_are_counted_once(tmp_path):
    """They are in the ledgers of the checkpoint: accounts that stay beside it would count them again."""
    settings, directories = saved_by_two_ranks(tmp_path)
    accounts = [directory.accounts.read_bytes() for directory in directories]
    before = sum_counts([ledger for _, _, ledger in resumed(settings, tmp_path, 2)])
    for count in (3, 1):
        for directory, text in zip(directories, accounts, strict=True):
            directory.accounts.write_bytes(text)
        found = sum_counts([ledger for _, _, ledger in resumed(settings, tmp_path, count)])
        assert found["produced"] == before["produced"]
        assert [directory.accounts.exists() for directory in directories] == [rank >= count for rank in range(2)]
