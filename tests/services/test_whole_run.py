"""Learner, two actors and an evaluator in one process, each in its thread, joined by the network in memory and the real codec.

Everything is real but the sockets: sessions, environments with known answers, algorithms, checkpoints' bookkeeping, ledger.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from common.algorithms.api import WorkerContext
from common.algorithms.ranks import ALONE
from common.algorithms.registry import ALGORITHMS, build_algorithm, build_payload, build_policy, rollout_schema
from common.algorithms.settings import DQNSettings, PPOSettings, PQNSettings, SACSettings, TD3Settings
from common.config.run_config import RunConfig
from common.config.schema import Settings
from common.config.sections import LearnerSettings, RolloutSettings, TargetSettings
from common.envs import probes
from common.envs.make import build, make
from common.envs.spec import EnvSettings
from common.envs.trial import spec_of
from common.errors import DropReason
from common.models.snapshot import ParameterLayout, flatten
from common.models.spec import ModelSettings
from common.observability.health import Health
from common.observability.learner_stats import LearnerStats
from common.observability.worker_metrics import ActorStats, EvaluatorStats
from common.protocol.learner_side import LearnerSide
from common.protocol.worker_side import Identity, WorkerSide
from common.runtime.checkpoint_files import Checkpoint
from common.runtime.checkpoints import CheckpointStore
from common.runtime.process import derive_seed
from common.runtime.run_directory import create
from common.transport.link import Link
from services.acting.incarnation import Incarnation, begin_incarnation
from services.acting.loop import ActorLoop
from services.acting.rollout import Rollout
from services.evaluator import EvaluatorLoop
from services.learner.accounts import AccountsFile
from services.learner.intake import Intake
from services.learner.journal import Journal
from services.learner.loop import TrainLoop
from services.learner.ranks import Agreement
from services.learner.record import RunRecord
from services.learner.results import Results
from services.learner.resume import session_config
from services.learner.saving import RunCheckpoints, restore_checkpoint
from tests.support.memory import MemoryHub

pytestmark = [pytest.mark.service, pytest.mark.timeout(800)]

PATIENCE = 120.0  # seconds; only a fault lets it pass


RECIPES = {
    "ppo": {"epochs": 4, "minibatch": 64},
    "impala": {"optimizer": "adam", "normalize_value": True},
    "a3c": {"normalize_value": True},
    "a3c-grad": {"lr_schedule": "linear", "lr_final": 1e-3, "lr_env_steps": 12_000},  # a step for each of its gradients
}


def probe(name, *, algorithm="ppo", mode="next_step", env_steps, mean100=None, lag=20):
    """Settings of a run on one of the environments with known answers."""
    recipe = {"gamma": 0.9, "learning_rate": 1e-2, "entropy_coef": 0.0} | RECIPES[algorithm]
    return Settings(
        env=EnvSettings(entry_point=f"common.envs.probes:{name}", num_envs=8, autoreset=mode),
        model=ModelSettings(hidden=(16,), activation="tanh", shared_trunk=False),
        algorithm=ALGORITHMS[algorithm].settings(**recipe),
        rollout=RolloutSettings(length=16),
        learner=LearnerSettings(batch=2, max_policy_lag=lag),
        target=TargetSettings(mean100=mean100, env_steps=env_steps),
    )


def pqn_probe(name, *, mode="next_step", env_steps, mean100=None, **algorithm):
    """Settings of a PQN run on one of the environments with known answers."""
    recipe = {"gamma": 0.9, "learning_rate": 5e-3, "minibatch": 64, "epsilon": 0.05, "epsilon_env_steps": 1_500}
    return Settings(
        env=EnvSettings(entry_point=f"common.envs.probes:{name}", num_envs=8, autoreset=mode),
        model=ModelSettings(hidden=(32,), layer_norm=True),
        algorithm=PQNSettings(**(recipe | algorithm)),
        rollout=RolloutSettings(length=16),
        learner=LearnerSettings(batch=2),
        target=TargetSettings(mean100=mean100, env_steps=env_steps),
    )


def with_memory(settings, cell):
    """The same run of a network with memory."""
    model = {"hidden": (16,), "shared_trunk": True, "recurrent": cell, "recurrent_size": 16}
    return settings.model_copy(update={"model": settings.model.model_copy(update=model)})


class KilledError(BaseException):
    """The learner's process ends here."""


@dataclass
class Run:
    """Results of a run."""

    record: RunRecord
    algorithm: object
    stats: object
    actors: list[ActorLoop]
    first_ratio_errors: list[float] = field(default_factory=list)
    reason: str = ""
    best: Checkpoint | None = None
    train_stats: LearnerStats | None = None

    def value(self, *observation):
        """Return the value of one observation, in units of return."""
        with torch.no_grad():
            value = self.algorithm.model(torch.tensor([observation], dtype=torch.float32)).value
        return self.algorithm._moments.denormalize(value).item()

    def action_values(self, *observation):
        """Return the action values of one observation."""
        with torch.no_grad():
            values, _ = self.algorithm.model(torch.tensor([observation], dtype=torch.float32))
        return values[0].tolist()

    def probability(self, action, *observation):
        """Return the probability of `action`."""
        with torch.no_grad():
            policy, _ = self.algorithm.model.policy(torch.tensor([observation], dtype=torch.float32))
        return policy.log_prob(torch.tensor([action])).exp().item()


class Colony:
    """The threads of one run."""

    def __init__(self, settings, folder, *, group=None, killed=frozenset()):
        """Build the learner, or one rank of it; workers connect in threads of their own.

        `killed`: numbers of the actors that are killed in the middle of a rollout, after three whole ones.
        """
        self.group, self.killed = group, killed
        self.settings, self.hub, self.failures = settings, MemoryHub(), []
        self.env = spec_of(settings.env)
        self.directory = create(folder / "run", config="x: 1\n", command=["rookery"])
        self.journal = Journal(self.directory, env_steps=0)
        self.actors, self.ratios, self.metrics = [], [], []
        self.spared = lambda: False  # whether they still live on
        self.bereaved = lambda: None  # called after one of them was killed
        self.replaced = False  # whether they are started again
        self.learner_kills = []  # numbers of the updates in which the learner is killed, to be started again at once
        self.saves = lambda: False  # whether a checkpoint that is due is written
        self.build()

    def build(self):
        """A learner's process: a new run, or one that goes on from the newest checkpoint."""
        settings = self.settings
        length, num_envs = settings.rollout.length, settings.env.num_envs
        ships = build_payload(settings.algorithm, model=settings.model, env=self.env, length=length, num_envs=num_envs)
        # A living worker is not away, however seldom its thread gets a core.
        unlimited = {"silence_seconds": 10 * PATIENCE, "forget_seconds": 10 * PATIENCE}
        limits = replace(session_config(settings, self.env, ships, "run-1", group=self.group), **unlimited)
        session = LearnerSide(limits, check=ships.check, episodes=ships.episodes)
        self.algorithm = build_algorithm(
            settings.algorithm,
            model=settings.model,
            env=self.env,
            seed=derive_seed(settings.run.seed, "model", role="learner"),
            ranks=self.group or ALONE,
            normalize_reward=settings.env.normalize_reward,
        )
        self.record = RunRecord(settings=settings, run_id="run-1", frame_skip=1, started_at=time.monotonic())
        architecture = ParameterLayout.of(self.algorithm.model).fingerprint
        self.store = CheckpointStore(self.directory.checkpoints, keep=2)
        checkpoint = self.store.load_newest(architecture=architecture, warn=pytest.fail, restore=lambda found: found)
        if checkpoint:
            restore_checkpoint(checkpoint, algorithm=self.algorithm, record=self.record, session=session, store=self.store)
        accounts = AccountsFile(self.directory.accounts, run_id="run-1", clock=time.monotonic)
        transport = self.hub.bind()
        self.intake = Intake(
            transport=transport, session=session, clock=time.monotonic, log_event=lambda _: None, accounts=accounts
        )
        self.alive = lambda **_: None  # called by each actor at each env step, and by the learner at each update

    def learner(self):
        """The loop of the learner, as its root builds it."""
        update = self.algorithm.update

        def watched(batch, progress, stop):
            self.alive()
            if self.learner_kills and progress.version >= self.learner_kills[0]:
                self.learner_kills.pop(0)
                raise KilledError
            result = update(batch, progress, stop)
            self.metrics.append(result.metrics)
            if progress.version == 0 or result.metrics.get("policy_lag_mean") == 0:
                self.ratios.append(result.metrics.get("first_ratio_error", np.nan))
            return result

        self.algorithm.update = watched
        agreement = Agreement(self.group) if self.group else None
        self.train_stats = stats = LearnerStats()
        results = Results(record=self.record, stats=stats, journal=self.journal, agreement=agreement, clock=time.monotonic)
        common = {"algorithm": self.algorithm, "intake": self.intake, "results": results, "health": Health()}
        disk = {"save_checkpoint": self.save, "save_best": self.store.save_best}
        disk |= {"remove_later": self.store.remove_later, "newest_saved": self.store.newest}
        checkpoints = RunCheckpoints(**common, **disk)
        # A killed actor says no goodbye: the drain ends once all workers that live have left.
        stopping = lambda: bool(self.failures or (self.killed and not any(map(threading.Thread.is_alive, self.threads))))  # noqa: E731
        return TrainLoop(**common, checkpoints=checkpoints, stopping=stopping, will_restart=False)

    def save(self, checkpoint):
        """Write a checkpoint, or not."""
        if self.saves():
            self.store.save(checkpoint)

    def link(self, role, number, life=1):
        """A welcomed link."""
        identity = Identity(role=role, name=f"{role}-{number}", incarnation=1000 * life, software="test")
        link = Link(transport=self.hub.connect(), session=WorkerSide(identity), clock=time.monotonic, log_event=lambda _: None)
        deadline = time.monotonic() + PATIENCE
        while link.welcome is None:
            assert time.monotonic() < deadline, f"{identity.name} is not welcomed"
            link.service(0.05)
        return link

    def seed(self, role, link):
        """Seeds by the newest Welcome."""
        index, generation = link.welcome.index, link.welcome.generation
        return partial(derive_seed, self.settings.run.seed, role=role, index=index, generation=generation)

    def policy(self, run, environment, seed):
        """The acting side, as the Welcome says."""
        context = WorkerContext(index=0, workers=run.actors, num_envs=environment.num_envs)
        return build_policy(
            run.algorithm, model=run.model, env=environment.spec, precision="fp32", seed=seed("policy"), context=context
        )

    def act(self, number, life=1):
        """An actor's life, the first of that name or the second."""
        link = self.link("actor", number, life)
        doomed = life == 1 and number in self.killed
        run = RunConfig.from_json(link.welcome.config)
        size = {"length": run.rollout.length, "num_envs": run.env.num_envs}

        def build():
            environment, seed = make(run.env), self.seed("actor", link)
            link.check_environment(environment.spec)
            schema = rollout_schema(run.algorithm, model=run.model, env=environment.spec, **size)
            return Incarnation(
                environment=environment,
                policy=self.policy(run, environment, seed),
                rollout=Rollout(schema, environment.reset(seed("environment"))),
            )

        def restart():
            return begin_incarnation(build, link.welcome)

        actor = ActorLoop(
            link=link,
            incarnation=restart(),
            restart=restart if self.settings.lockstep else None,
            message_type=build_payload(run.algorithm, model=run.model, env=self.env, **size).message_type,
            stats=ActorStats(),
            stopping=lambda: (
                bool(self.failures) or (doomed and actor.stats.env_steps > 3.5 * size["length"] * 8 and not self.spared())
            ),
            alive=self.alive,
        )
        self.actors.append(actor)
        reason = actor.run()
        if doomed:  # without a goodbye
            link._transport.close()  # as the kernel closes the sockets of a process
            self.bereaved()
            if self.replaced:
                self.act(number, life=2)
            return
        link.count(actor.stats.env_steps, actor.stats.dropped)
        link.close(reason)

    def evaluate(self):
        """An evaluator's life."""
        link = self.link("evaluator", 0)
        seed = self.seed("evaluator", link)
        run = RunConfig.from_json(link.welcome.config)
        environment = build(run.env, 20)
        policy = self.policy(run, environment, seed)
        evaluator = EvaluatorLoop(
            link=link,
            environment=environment,
            episodes=20,
            policy=policy,
            seed=seed("environment"),
            every_seconds=1000.0,
            rest=lambda: None,
            stats=EvaluatorStats(),
            stopping=lambda: bool(self.failures),
            alive=lambda **_: None,
            clock=time.monotonic,
        )
        link.close(evaluator.run())
        environment.close()

    def train(self):
        """A learner's life; "" where it was killed."""
        self.loop = self.learner()
        self.intake.start()
        try:
            return self.loop.run()
        except KilledError:
            self.intake.close()
            return ""

    def guarded(self, life):
        """Return a thread that ends all others, and the test, when it fails."""

        def run():
            try:
                life()
            except BaseException as failure:  # noqa: BLE001 - shown by the test
                self.failures.append(failure)

        return threading.Thread(target=run)

    def run(self, actors=2, evaluator=True):
        """From the first hello to the last goodbye."""
        lives = [*(partial(self.act, number) for number in range(actors)), *([self.evaluate] if evaluator else [])]
        self.threads = threads = [self.guarded(life) for life in lives]
        for thread in threads:
            thread.start()
        try:
            while not (reason := self.train()):
                self.build()
        except BaseException as failure:
            self.failures.append(failure)
            raise
        finally:
            for thread in threads:
                thread.join(PATIENCE)
            self.intake.close()
            self.journal.close()
        assert not self.failures, self.failures
        return Run(
            record=self.record,
            algorithm=self.algorithm,
            stats=self.intake.stats,
            actors=self.actors,
            first_ratio_errors=self.ratios,
            reason=reason,
            best=self.store.load_best(warn=pytest.fail),
            train_stats=self.train_stats,
        )


def assert_accounts_agree(run):
    """The learner's books, and what the actors counted for themselves: to the step."""
    ledger = run.stats.ledger
    assert (ledger["queued"], ledger["in_flight"]) == (0, 0)
    assert ledger["trained"] == run.record.env_steps
    assert ledger["produced"] == sum(actor.stats.env_steps for actor in run.actors)
    assert ledger["produced"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert ledger["dropped"][DropReason.UNFINISHED] == sum(actor.stats.dropped[DropReason.UNFINISHED] for actor in run.actors)
    lost = {reason for reason, steps in ledger["dropped"].items() if steps}
    assert lost <= {DropReason.UNFINISHED, DropReason.RUN_ENDED}


@pytest.mark.parametrize("algorithm", RECIPES)
def test_the_action_that_matters_is_learned(tmp_path, algorithm):
    """Reward 1 for the action that matches the observation: solved by its mean of 100, greedy play is perfect, books agree."""
    run = Colony(probe("matching_action", algorithm=algorithm, env_steps=60_000, mean100=0.97), tmp_path).run()
    assert run.reason == "target reached"
    assert run.record.solved
    assert run.probability(1, 1.0) > 0.8
    assert run.probability(0, -1.0) > 0.8
    assert run.record.last_evaluation == {"version": run.record.version, "mode": "greedy", "mean": 1.0, "episodes": 20}
    assert (run.best.version, run.best.env_steps) == (run.record.version, run.record.env_steps)
    assert run.best.state["policy"].numpy().tobytes() == flatten(run.algorithm.model, "fp32").tobytes()
    assert_accounts_agree(run)


OBSERVED = ("observed_value", {1.0: 1.0, -1.0: -1.0})
DISCOUNTED = ("discounted_value", {0.0: 0.9, 1.0: 1.0})


@pytest.mark.parametrize(
    ("algorithm", "mode", "name", "values"),
    [
        ("ppo", "same_step", *OBSERVED),  # that observations arrive is shown of the others by the actions that they learn
        ("ppo", "same_step", *DISCOUNTED),
        *((name, "next_step", *DISCOUNTED) for name in RECIPES),
    ],
)
def test_values_come_to_their_known_answers(tmp_path, algorithm, mode, name, values):
    """Value loss, observations and discounting, each through the whole pipeline and under either autoreset mode."""
    env_steps = 12_000 if algorithm == "a3c-grad" else 6_000
    settings = probe(name, algorithm=algorithm, mode=mode, env_steps=env_steps)
    if algorithm != "ppo":  # PPO takes several gradient steps per batch, the others one: they get more batches
        settings = settings.model_copy(update={"rollout": RolloutSettings(length=8)})
    run = Colony(settings, tmp_path).run()
    assert run.reason == "env step budget spent"
    for observation, value in values.items():
        assert run.value(observation) == pytest.approx(value, abs=0.1)
    assert_accounts_agree(run)


@pytest.mark.parametrize("algorithm", [name for name in RECIPES if name != "a3c-grad"])
def test_fresh_experience_has_the_very_probabilities_of_the_weights_that_acted(tmp_path, algorithm):
    """One actor, one batch at a time: on its first minibatch the ratio of new to old probability is 1, within rounding."""
    settings = probe("matching_action", algorithm=algorithm, env_steps=4_000)
    settings = settings.model_copy(update={"learner": LearnerSettings(batch=1, credits=1, snapshot_precision="fp32")})
    run = Colony(settings, tmp_path).run(actors=1)
    assert run.first_ratio_errors
    assert np.max(run.first_ratio_errors) < 1e-5
    assert_accounts_agree(run)


@pytest.mark.parametrize(
    ("algorithm", "cell", "mode"),
    [
        ("ppo", "lstm", "next_step"),
        ("ppo", "gru", "same_step"),
        ("impala", "lstm", "same_step"),
        ("a3c", "gru", "next_step"),
        ("a3c-grad", "lstm", "next_step"),
        ("pqn", "gru", "same_step"),
    ],
)
def test_an_action_that_only_a_memory_can_know_is_learned(tmp_path, algorithm, cell, mode):
    """Episodes go on from one rollout to the next; also the evaluator's policy remembers, and forgets."""
    if algorithm == "pqn":
        settings = pqn_probe("recalled_action", mode=mode, env_steps=60_000, mean100=0.9)
    else:
        settings = probe("recalled_action", algorithm=algorithm, mode=mode, env_steps=60_000, mean100=0.97)
    if algorithm == "ppo":  # where all returns are 1, advantages are noise: scaled up, it spoils one policy of 25
        calm = settings.algorithm.model_copy(update={"least_advantage_std": 0.2})
        settings = settings.model_copy(update={"algorithm": calm})
    run = Colony(with_memory(settings, cell), tmp_path).run()
    assert run.reason == "target reached"
    assert run.record.last_evaluation["mean"] == 1.0
    assert_accounts_agree(run)


def test_without_a_memory_the_same_action_is_chance(tmp_path):
    run = Colony(probe("recalled_action", env_steps=8_000), tmp_path).run()
    assert abs(np.mean(run.record.returns)) < 0.5
    assert_accounts_agree(run)


def test_a_continuous_action_is_learned_by_ppo_in_the_scale_of_its_bounds(tmp_path):
    """Actions -1 to 3, the best 0 and 2; the noise of the actors begins with half the range and shrinks by itself."""
    settings = probe("aimed_action", env_steps=8_000)
    algorithm = PPOSettings(gamma=0.9, learning_rate=3e-3, minibatch=64, epochs=4)  # at 1e-2 3 runs of 80 diverged
    run = Colony(settings.model_copy(update={"algorithm": algorithm}), tmp_path).run()
    assert run.record.training["entropy_coef"] == 0.0
    assert run.record.last_evaluation["mean"] > -0.1  # at random -5, the best constant action -1
    assert_accounts_agree(run)


@pytest.mark.parametrize(
    ("algorithm", "kind", "least"),
    [("ppo", "multi_discrete", 1.9), ("ppo", "multi_binary", 3.9), ("ppo", "box", -0.1)],
)
def test_each_component_of_an_action_is_learned(tmp_path, algorithm, kind, least):
    """Several numbers that begin elsewhere than at 0, switches, and a table of numbers without bounds."""
    settings = probe("joint_action", algorithm=algorithm, env_steps=60_000, mean100=None if kind == "box" else 0.95 * least)
    env = settings.env.model_copy(update={"kwargs": {"kind": kind}})
    sections = {"env": env}
    if kind == "box":
        sections["target"] = TargetSettings(mean100=None, env_steps=12_000)
        sections["algorithm"] = PPOSettings(gamma=0.9, learning_rate=3e-3, minibatch=64, epochs=4)
    run = Colony(settings.model_copy(update=sections), tmp_path).run()
    assert run.record.last_evaluation["mean"] > least
    assert_accounts_agree(run)


@pytest.mark.parametrize(("algorithm", "kind"), [("ppo", "discrete"), ("impala", "multi_discrete"), ("a3c-grad", "multi_binary")])
def test_discrete_observations_lead_to_the_action_that_they_name(tmp_path, algorithm, kind):
    """The network sees their one-hot codes, whatever number they begin at."""
    settings = probe("named_action", algorithm=algorithm, env_steps=60_000, mean100=0.97)
    env = settings.env.model_copy(update={"kwargs": {"kind": kind}, "frame_stack": 2 if kind == "multi_discrete" else 1})
    run = Colony(settings.model_copy(update={"env": env}), tmp_path).run()
    assert run.record.last_evaluation["mean"] == 1.0
    assert_accounts_agree(run)


def test_action_values_of_discrete_observations_are_learned_from_the_memory(tmp_path):
    settings = q_probe("named_action", env_steps=6_000)
    env = settings.env.model_copy(update={"kwargs": {"kind": "discrete"}})
    run = Colony(settings.model_copy(update={"env": env}), tmp_path).run()
    assert run.record.last_evaluation["mean"] == 1.0
    assert_accounts_agree(run)


@pytest.mark.parametrize(
    ("algorithm", "actions", "mask", "stack"),
    [
        ("ppo", "discrete", "leaf", 2),
        ("impala", "multi_discrete", "info", 1),
        ("a3c-grad", "multi_discrete", "leaf", 1),
        ("pqn", "discrete", "leaf", 2),
        ("dqn", "discrete", "info", 2),
        ("sac", "box", "", 1),  # of TD3 and PPO the continuous actions are learned from vectors, below and above
    ],
)
def test_all_leaves_of_an_observation_and_its_mask_lead_to_the_best_allowed_action(tmp_path, algorithm, actions, mask, stack):
    """An image, a vector and a number, nested; a forbidden action is never taken, also not by exploration."""
    least, mean100 = (-0.15, None) if actions == "box" else (0.8, 0.95)
    if algorithm == "dqn":
        least = 0.5  # the 100 episodes of the target say more than these 20; without one of the coins their mean is at most 0.56
        recipe = {"learning_rate": 1e-3, "samples_per_insert": 16, "n_step": 1, "dueling": False}
        settings = q_probe("mixed_action", env_steps=30_000, mean100=0.85, **recipe)
    elif algorithm == "pqn":
        least = 0.5  # as of dqn
        settings = pqn_probe("mixed_action", env_steps=60_000, mean100=0.85, learning_rate=2e-3)
    elif algorithm == "sac":
        recipe = {"samples_per_insert": 16, "warmup": 200, "random_env_steps": 400, "replay_capacity": 10_000, "minibatch": 64}
        section = SACSettings(gamma=0.9, learning_rate=2e-3, **recipe)
        settings = q_probe("mixed_action", env_steps=4_000).model_copy(update={"algorithm": section})
    else:
        settings = probe("mixed_action", algorithm=algorithm, env_steps=60_000, mean100=mean100)
        rate = {"learning_rate": 1e-3 if actions == "discrete" else 3e-3}
        settings = settings.model_copy(update={"algorithm": settings.algorithm.model_copy(update=rate)})
    named = {"kwargs": {"actions": actions, "mask": mask}, "action_mask": bool(mask), "frame_stack": stack}
    model = settings.model.model_copy(update={"hidden": (64,), "conv": ()})
    sections = {"env": settings.env.model_copy(update=named), "model": model}
    run = Colony(settings.model_copy(update=sections), tmp_path).run()
    assert run.reason == ("env step budget spent" if actions == "box" else "target reached")
    assert run.record.last_evaluation["mean"] > least
    assert min(run.record.returns) > -8.0
    assert_accounts_agree(run)


@pytest.mark.parametrize("algorithm", ["ppo", "impala", "dqn"])
def test_agents_that_leave_at_different_times_learn_one_policy(tmp_path, algorithm):
    """Of 1 and 3 env steps. Nothing is learned from the rows of one that has left: a value is that of the steps still to come."""
    settings = (
        q_probe("leaving_agents", env_steps=6_000)
        if algorithm == "dqn"
        else probe("leaving_agents", algorithm=algorithm, env_steps=12_000)
    )
    run = Colony(settings, tmp_path).run()
    assert run.record.last_evaluation["mean"] == 2.0
    for left, value in ((1.0, 1.0), (2.0, 1.9), (3.0, 2.71)):
        for coin in (-1.0, 1.0):
            found = max(run.action_values(coin, left)) if algorithm == "dqn" else run.value(coin, left)
            assert found == pytest.approx(value, abs=0.2)
    assert_accounts_agree(run)


@pytest.mark.parametrize(
    ("layout", "dtype", "conv"),
    [("hwc", "uint8", "auto"), ("chw", "uint8", "auto"), ("hw", "float32", "auto"), ("hwc", "uint8", "impala")],
)
def test_images_in_every_layout_lead_to_the_action_that_they_name(tmp_path, layout, dtype, conv):
    """Colours last, or first and stacked, or grey and of floats: through the whole pipeline, by convolutions, or a ResNet."""
    settings = probe("pictured_action", env_steps=8_000, mean100=0.9)
    kwargs, stack = {"layout": layout, "dtype": dtype}, 2 if layout == "chw" else 1
    env = settings.env.model_copy(update={"kwargs": kwargs, "frame_stack": stack})
    algorithm = settings.algorithm.model_copy(update={"learning_rate": 2e-3})
    model = settings.model.model_copy(update={"conv": conv})
    run = Colony(settings.model_copy(update={"env": env, "algorithm": algorithm, "model": model}), tmp_path).run()
    assert len(run.algorithm.model.trunk.conv) > 0
    assert run.reason == "target reached"
    assert run.record.last_evaluation["mean"] > 0.9
    assert_accounts_agree(run)


def test_a_continuous_action_is_learned_from_the_memory_at_the_pace_that_was_asked_for(tmp_path):
    """TD3: actors at random first, replay, the actor alone published; greedy play comes to the known optimum, books agree."""
    settings = Settings(
        env=EnvSettings(entry_point="common.envs.probes:aimed_action", num_envs=8),
        model=ModelSettings(hidden=(32,)),
        algorithm=TD3Settings(
            gamma=0.9,
            learning_rate=3e-3,
            minibatch=32,
            samples_per_insert=16,
            replay_capacity=10_000,
            warmup=200,
            random_env_steps=400,
        ),
        rollout=RolloutSettings(length=8),
        learner=LearnerSettings(batch=1),
        target=TargetSettings(env_steps=4_000),
    )
    run = Colony(settings, tmp_path).run()
    assert run.reason == "env step budget spent"
    assert run.record.last_evaluation["mean"] > -0.05  # at random -1.9, the best constant action -1
    assert run.record.mean_return > -0.3  # the noise of the actors costs 0.04
    assert run.record.training["samples_per_insert"] == pytest.approx(16, abs=32 / 3_000)
    assert_accounts_agree(run)


def q_probe(name, *, mode="next_step", env_steps, mean100=None, **algorithm):
    """Settings of a DQN run on one of the environments with known answers."""
    recipe = {
        "gamma": 0.9,
        "learning_rate": 5e-3,
        "minibatch": 32,
        "samples_per_insert": 6,
        "replay_capacity": 5_000,
        "warmup": 200,
        "target_every": 25,
        "epsilon": 0.05,
        "epsilon_env_steps": 1_500,
    }
    return Settings(
        env=EnvSettings(entry_point=f"common.envs.probes:{name}", num_envs=8, autoreset=mode),
        model=ModelSettings(hidden=(32,)),
        algorithm=DQNSettings(**(recipe | algorithm)),
        rollout=RolloutSettings(length=8),
        learner=LearnerSettings(batch=1),
        target=TargetSettings(mean100=mean100, env_steps=env_steps),
    )


def test_action_values_lead_to_the_action_that_matters_at_the_pace_that_was_asked_for(tmp_path):
    """DQN: learned to its mean of 100; asked and measured samples per insert agree, and so do the books."""
    settings = q_probe("matching_action", env_steps=20_000, mean100=0.8)
    run = Colony(settings, tmp_path).run()
    assert run.reason == "target reached"
    assert run.record.last_evaluation["mean"] == 1.0
    for observation, action in ((1.0, 1), (-1.0, 0)):
        values = run.action_values(observation)
        assert values[action] == pytest.approx(1.0, abs=0.1)
        assert values[1 - action] == pytest.approx(-1.0, abs=0.3)
    paying = run.record.env_steps - settings.algorithm.warmup
    assert run.record.training["samples_per_insert"] == pytest.approx(6, rel=0.02)
    assert run.algorithm._gradient_steps * 32 == pytest.approx(6 * paying, rel=0.02)
    assert_accounts_agree(run)


def large_rewards():
    """`matching_action` with rewards of 10,000 and -10,000."""
    return gymnasium.wrappers.TransformReward(probes.matching_action(), lambda reward: 1e4 * reward)


def test_large_rewards_are_learned_in_units_of_their_deviation_and_reported_raw(tmp_path):
    settings = q_probe("matching_action", env_steps=20_000, mean100=8_000.0)
    changed = {"entry_point": f"{__name__}:large_rewards", "normalize_reward": True}
    run = Colony(settings.model_copy(update={"env": settings.env.model_copy(update=changed)}), tmp_path).run()
    assert run.reason == "target reached"
    assert run.record.last_evaluation["mean"] == 10_000.0
    std = run.record.training["reward_std"]
    assert 3_000 < std <= 10_000
    assert run.action_values(1.0)[1] == pytest.approx(1e4 / std, rel=0.2)
    assert_accounts_agree(run)


@pytest.mark.parametrize(("mode", "name", "values"), [("next_step", *DISCOUNTED), ("same_step", *OBSERVED)])
def test_action_values_come_to_their_known_answers(tmp_path, mode, name, values):
    """Replay, windows over the ends of episodes and discounting, through the whole pipeline, under either autoreset mode."""
    run = Colony(q_probe(name, mode=mode, env_steps=6_000), tmp_path).run()
    assert run.reason == "env step budget spent"
    for observation, value in values.items():
        assert run.action_values(observation) == pytest.approx([value, value], abs=0.1)
    assert_accounts_agree(run)


def test_an_actor_killed_in_the_middle_of_a_group_holds_nobody_up(tmp_path):
    """One of four is gone without a word: its groups are trained on with what there is, and the books balance at the end.

    A group waits for a whole minute while all live, and a moment afterwards: whether it is whole does not depend on speed.
    """
    settings = probe("matching_action", algorithm="a3c-grad", env_steps=8_000)
    learner = settings.learner.model_copy(update={"batch": 4, "credits": 1, "batch_seconds": 60.0})
    colony = Colony(settings.model_copy(update={"learner": learner}), tmp_path, killed=frozenset({0}))
    colony.bereaved = lambda: setattr(colony.loop, "_patience", 0.1)
    colony.spared = lambda: not any(metrics["gradients"] == 4.0 for metrics in colony.metrics)
    run = colony.run(actors=4)
    assert run.reason == "env step budget spent"
    assert {4.0} < {metrics["gradients"] for metrics in colony.metrics} <= {1.0, 2.0, 3.0, 4.0}
    ledger = run.stats.ledger
    assert (ledger["queued"], ledger["in_flight"]) == (0, 0)
    assert ledger["trained"] == run.record.env_steps
    assert ledger["produced"] == ledger["trained"] + sum(ledger["dropped"].values())


def test_every_algorithm_has_a_run_of_its_own_here():
    """A new entry of the registry is part of these runs."""
    assert {*RECIPES, "pqn", "td3", "sac", "dqn"} == set(ALGORITHMS)
