"""Tests of the shared root with both roles: command line, refusals of the learner, and the end of the process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import msgpack
import pytest

from common.algorithms.registry import rollout_schema
from common.config.run_config import EnvRunConfig, RunConfig
from common.config.schema import Settings
from common.config.sections import ActorSettings, PolicyServerSettings
from common.envs.make import build
from common.envs.remote import observe_schema
from common.envs.spec import EnvSettings
from common.envs.trial import spec_of
from common.envs.vector import VectorEnvironment
from common.errors import ConfigError, RunChangedError
from common.models import arithmetic
from common.observability.health import Health
from common.observability.worker_metrics import ACTOR_METRICS, ActorStats
from common.protocol import codec
from common.protocol.messages import (
    ACTOR_STATE,
    ENV_WORKER,
    PROTOCOL_VERSION,
    ArraySpec,
    Drain,
    Envelope,
    Goodbye,
    Hello,
    Refusal,
    SnapshotWanted,
    Welcome,
)
from common.runtime import process
from common.runtime.lifecycle import BUILD_SECONDS, Shutdown
from common.transport.api import Handshakes
from common.transport.curve import ServerKeys, make
from common.transport.link import Link
from common.transport.zmq import ZmqServer
from services import actor, env_worker, evaluator, policy_server, worker
from services.acting.loop import ActorLoop
from services.acting.policy import policy_of
from services.env_worker import EnvWorkerLoop
from services.evaluator import EvaluatorLoop

pytestmark = pytest.mark.system

ROOTS = {"actor": actor, "evaluator": evaluator}
each_role = pytest.mark.parametrize("role", ROOTS)


def frames(message):
    """A message of the run as bytes."""
    return codec.encode(Envelope(run="run-1", message=message))


def welcome(*, config=None, signature=None, schema=None, heartbeat=1.0, index=0):
    """Return a Welcome."""
    settings = Settings()
    env, shape = spec_of(settings.env), {"length": settings.rollout.length, "num_envs": settings.env.num_envs}
    return Welcome(
        index=index,
        generation=0,
        config=RunConfig.of(settings, run_id="run-1").model_dump_json() if config is None else config,
        env_signature=env.signature if signature is None else signature,
        schema=rollout_schema(settings.algorithm, model=settings.model, env=env, **shape) if schema is None else schema,
        credits=1,
        version=-1,
        heartbeat_seconds=heartbeat,
    )


def naming(entry_point, **kwargs):
    """A run's configuration with an environment that is built by `entry_point`."""
    settings = Settings(env=EnvSettings(entry_point=entry_point, kwargs=kwargs))
    return RunConfig.of(settings, run_id="run-1").model_dump_json()


class Learner:
    """Answers a message with what `answer` makes of it, or with nothing."""

    def __init__(self, answer, keys):
        """Bound to any free port."""
        self.transport, self.answer = ZmqServer("tcp://127.0.0.1:0", linger=0.5, keys=keys), answer
        self.over, self.seldom = threading.Event(), lambda: None  # done when nothing came for a while
        self.endpoint, self.heard = self.transport.endpoint, []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        """Until the test is over and each worker's connection has ended, behind its last message."""
        routes = set()
        while not self.over.is_set() or any(self.transport.send(route, [b""]) for route in routes):
            self.receive(0.1, routes)
        while self.receive(0.0, routes):
            pass
        self.transport.close()

    def receive(self, seconds, routes):
        """Receive and answer one message; return whether there was one."""
        if (arrived := self.transport.receive(seconds)) is None:
            self.seldom()
            return False
        route, received = arrived
        routes.add(route)
        self.heard.append(codec.decode(received).message)
        if answer := self.answer(self.heard[-1]):
            self.transport.send(route, answer)
        return True

    def end(self):
        """Hear what is still on the way; all messages."""
        self.over.set()
        self.thread.join()
        return self.heard


@pytest.fixture
def learner():
    """Starts a learner with its answers: one to everything, or by message."""
    started = []

    def start(answer, keys=None):
        started.append(Learner(answer if callable(answer) else lambda _: answer, keys))
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    """An empty folder, no lower priority for the tester, and a log that is as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "nice", lambda _: None)
    before, level = list(logging.getLogger().handlers), logging.getLogger().level
    yield
    logging.getLogger().handlers[:] = before
    logging.getLogger().setLevel(level)


@each_role
def test_one_fact_is_enough(role):
    """`rookery actor --learner tcp://host:port`; all else comes with the Welcome."""
    invocation = worker.parse(role, ["--learner", "tcp://127.0.0.1:5999"], {})
    own = getattr(invocation.settings, role)
    assert (own.learner, own.name, invocation.debug) == ("tcp://127.0.0.1:5999", "", False)
    assert (own.keys, own.insecure, own.allow_code) == ("", False, ())


@pytest.mark.parametrize("name", worker.SERVICES)
def test_the_example_of_the_help_is_accepted(name, capsys):
    with pytest.raises(SystemExit):
        worker.parse(name, ["--help"], {})
    command = capsys.readouterr().out.partition(f"example: rookery {name} ")[2]
    worker.parse(name, command.split(), {})


@each_role
def test_what_the_owner_of_a_worker_permits_is_said_by_options(role):
    """`rookery actor --learner tcp://host:port --insecure --allow-code mygames`, as on a second machine."""
    words = ["--learner", "tcp://10.0.0.7:5700", "--insecure", "--allow-code", "mygames", "--allow-code", "other.envs"]
    own = getattr(worker.parse(role, words, {}).settings, role)
    assert (own.learner, own.insecure, own.allow_code) == ("tcp://10.0.0.7:5700", True, ("mygames", "other.envs"))


@each_role
def test_a_learner_of_another_machine_needs_keys_or_a_trusted_network(role, capsys):
    """One line before anything is sent there."""
    assert ROOTS[role].main(["--learner", "tcp://10.0.0.7:5700"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"rookery {role}: error: {role}.learner: found tcp://10.0.0.7:5700, wanted an address of this machine")
    assert f"{role}.keys" in err
    assert f"set {role}.insecure=true" in err


@each_role
def test_the_environment_can_say_it_too(role):
    """A container gets its settings as variables, and its command line from the image."""
    prefix = f"ROOKERY_{role.upper()}"
    environ = {
        f"{prefix}__LEARNER": "tcp://learner:5700",
        f"{prefix}__INSECURE": "true",
        f"{prefix}__ALLOW_CODE": "[mygames]",
        "ROOKERY_METRICS__PORT": "9100",
    }
    settings = worker.parse(role, ["--name", "the-third"], environ).settings
    own = getattr(settings, role)
    assert (own.learner, own.name, settings.metrics.port) == ("tcp://learner:5700", "the-third", 9100)
    assert (own.insecure, own.allow_code) == (True, ("mygames",))


@each_role
@pytest.mark.parametrize("address", ["10.0.0.7:5700", "tcp://:5700", "tcp://10.0.0.7:99999"])
def test_an_address_that_cannot_be_is_refused(role, address):
    """Before anything is waited for."""
    with pytest.raises(ConfigError, match="tcp://host:port"):
        worker.parse(role, ["--learner", address], {})


@each_role
def test_an_unknown_option_is_one_line_and_exit_code_2(role, capsys):
    """No page of usage that hides the word that was wrong."""
    with pytest.raises(SystemExit) as end:
        worker.parse(role, ["--lerner", "tcp://10.0.0.7:5700"], {})
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "refused", "why"),
    [
        ("actor", "env.num_envs=99", "the learner sends it"),
        ("actor", "actor.precision=bf16", "the learner sends it"),
        ("actor", "algorithm.name=dqn", "the learner sends it"),
        ("actor", "policy_server.workers=3", "another one reads it"),
        ("evaluator", "actor.torch_threads=2", "another one reads it"),
        ("actor", "evaluator.allow_code=[mine]", "another one reads it"),
        ("policy-server", "rollout.length=5", "the learner sends it"),
        ("env-worker", "env.num_envs=99", "the learner sends it"),
    ],
)
def test_a_setting_that_the_worker_does_not_read_is_refused_on_its_command_line(name, refused, why):
    """It was accepted without a word, and the run went on with another value."""
    with pytest.raises(
        ConfigError, match=rf"has no effect on this process: {why}: found .* \(command line\), wanted a setting of"
    ):
        worker.parse(name, [refused], {})


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("actor", "actor.torch_threads=2"),
        ("actor", "env.entry_point=common.envs.probes:matching_action"),  # a permission, as the two below
        ("actor", "env.id=mpe2:simple_spread_v3"),
        ("env-worker", "env.id=ale_py:ALE/Pong-v5"),
        ("evaluator", "evaluator.episodes=3"),
        ("policy-server", "policy_server.step_timeout_ms=50.0"),
        ("env-worker", "log.level=debug"),
    ],
)
def test_a_setting_that_the_worker_reads_is_taken_from_its_command_line(name, accepted):
    parsed = worker.parse(name, [accepted, *(["--workers", "2"] * (name == "policy-server"))], {})
    key, _, value = accepted.partition("=")
    section, _, field = key.partition(".")
    assert str(getattr(getattr(parsed.loaded.settings, section), field)) == value


@each_role
def test_a_word_that_is_no_setting_is_named_as_such(role):
    with pytest.raises(ConfigError, match=r"wanted section\.key=value"):
        worker.parse(role, ["env.num_envs"], {})


ANSWERS = {
    "another run": (
        lambda: frames(Refusal(code="run", reason="run: found 'a', wanted 'b'; restart", retry=False)),
        ["'a'", "'b'", "restart"],
    ),
    "another protocol": (
        lambda: [msgpack.packb({"v": PROTOCOL_VERSION + 1, "tag": "refusal"})],
        [f"found {PROTOCOL_VERSION + 1}", f"wanted {PROTOCOL_VERSION}", "same rookery version"],
    ),
    "another environment": (lambda: frames(welcome(signature="0123")), ["environment", "0123", "install"]),
    "code that was not allowed": (
        lambda: frames(welcome(config=naming("os:system", command="touch ran"))),
        ["env.entry_point 'os:system'", "--allow-code os", "tcp://127.0.0.1:"],
    ),
    "another release's settings": (lambda: frames(welcome(config='{"run_id": 5}')), ["configuration", "same rookery version"]),
}


@each_role
@pytest.mark.parametrize("what", ANSWERS)
def test_a_learner_of_another_kind_costs_one_line_and_exit_code_2(role, what, learner, capsys):
    """A wrong address, a leftover process, a machine with another release: found, wanted, what to do; no traceback, no hang."""
    answer, says = ANSWERS[what]
    assert ROOTS[role].main(["--learner", learner(answer()).endpoint, "--name", "one"]) == 2
    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if "error:" in line]
    assert line.startswith(f"rookery {role}: error: ")
    assert "Traceback" not in err
    for word in says:
        assert word in line
    assert not Path("ran").exists()


def test_an_env_worker_with_another_environment_than_its_policy_server_costs_one_line_and_exit_code_2(learner, capsys):
    config = EnvRunConfig(run_id="run-1", seed=1, environment_seed=1, algorithm="ppo", env=Settings().env).model_dump_json()
    server = learner(frames(welcome(config=config, signature="0123")))
    assert env_worker.main(["--policy-server", server.endpoint, "--name", "one"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert line.startswith("rookery env-worker: error: the environment here is not the policy server's: found signature ")
    assert "0123" in line


def resets_in_the_step():
    """A vector environment of a user."""
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    return gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})


def test_an_env_worker_refuses_an_environment_that_resets_in_the_step_of_an_end(learner, capsys):
    """A step that contains a slow reset comes too late, and its end with it."""
    env = EnvSettings(entry_point=f"{__name__}:resets_in_the_step", num_envs=4)
    config = EnvRunConfig(run_id="run-1", seed=1, environment_seed=1, algorithm="ppo", env=env).model_dump_json()
    rows = observe_schema(spec_of(env), rows=4)
    server = learner(frames(welcome(config=config, signature=spec_of(env).signature, schema=rows)))
    arguments = ["--policy-server", server.endpoint, "--name", "one", "--allow-code", "tests"]
    assert env_worker.main(arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "resets_in_the_step resets in the step of an episode's end" in line
    assert "found SAME_STEP, wanted NEXT_STEP, or no policy server" in line


@pytest.fixture
def environments(monkeypatch):
    """The environments that are built and not closed yet."""
    alive, build, close = [], VectorEnvironment.__init__, VectorEnvironment.close

    def built(environment, *args, **settings):
        build(environment, *args, **settings)
        alive.append(environment)

    def closed(environment):
        alive.remove(environment)
        close(environment)

    monkeypatch.setattr(VectorEnvironment, "__init__", built)
    monkeypatch.setattr(VectorEnvironment, "close", closed)
    return alive


@each_role
def test_environments_are_closed_at_the_end_behind_the_goodbye(role, learner, environments, monkeypatch):
    """The learner waits for the Goodbye; a simulator may take seconds to end."""
    greeted, drain = frames(welcome()), frames(Drain(reason="target reached", deadline_seconds=0.1))
    close, open_then = Link.close, []

    def closed(link, reason):
        open_then.append(len(environments))
        close(link, reason)

    monkeypatch.setattr(Link, "close", closed)
    welcoming = learner(lambda message: {Hello: greeted, SnapshotWanted: drain}.get(type(message)))
    assert ROOTS[role].main(["--learner", welcoming.endpoint, "--name", "one"]) == 0
    assert (open_then, environments) == ([1], [])


@pytest.mark.parametrize("loop", [ActorLoop, EvaluatorLoop, EnvWorkerLoop])
def test_environments_are_closed_when_their_loop_fails(loop, learner, environments, monkeypatch, capsys):
    def run(_):
        raise ValueError("the simulator has crashed")

    monkeypatch.setattr(loop, "run", run)
    if loop is EnvWorkerLoop:
        env = Settings().env
        config = EnvRunConfig(run_id="run-1", seed=1, environment_seed=1, algorithm="ppo", env=env).model_dump_json()
        rows = observe_schema(spec_of(env), rows=env.num_envs)
        server = learner(frames(welcome(config=config, schema=rows)))
        code = env_worker.main(["--policy-server", server.endpoint, "--name", "one"])
    else:
        root = actor if loop is ActorLoop else evaluator
        code = root.main(["--learner", learner(frames(welcome())).endpoint, "--name", "one"])
    assert code == 1
    assert 'unexpected_error error="ValueError: the simulator has crashed"' in capsys.readouterr().err
    assert environments == []


def fixed():
    """A vector environment of a size of its own."""
    return gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")


def welcomed_as(role, run, *, settings=None, index=0, resources=None):
    """A worker that was welcomed to a slot."""
    return worker.WelcomedWorker(
        invocation=SimpleNamespace(settings=settings),
        role=role,
        link=SimpleNamespace(welcome=welcome(index=index)),
        run=run,
        shutdown=Shutdown(),
        health=Health(),
        resources=resources or ExitStack(),
    )


@pytest.mark.parametrize(
    ("env", "wanted"), [(EnvSettings(), 10), (EnvSettings(entry_point=f"{__name__}:fixed", num_envs=4), 4)], ids=["any", "fixed"]
)
def test_environments_of_a_new_incarnation_take_the_place_of_those_before(env, wanted, environments):
    with ExitStack() as resources:
        welcomed = welcomed_as("actor", SimpleNamespace(env=env, seed=1), resources=resources)
        welcomed.environments()
        built = welcomed.environments(lambda env: build(env, 10))
        assert (environments, built.num_envs) == ([built], wanted)
    assert environments == []


def test_env_workers_build_their_environments_from_seeds_of_their_own_at_each_policy_server():
    """An environment may take a seed only when it is built: those of the same slots would play the same games."""
    settings = Settings(policy_server=PolicyServerSettings(workers=2))
    run, seeds = RunConfig.of(settings, run_id="run-1"), []
    for server in range(2):
        session = policy_server._session(welcomed_as("actor", run, settings=settings, index=server), spec_of(settings.env))
        config = EnvRunConfig.from_json(session.env_config)
        seeds += [welcomed_as(ENV_WORKER, config, settings=settings, index=slot).seed("environment") for slot in range(2)]
    assert len(set(seeds)) == 4


def test_environments_of_each_incarnation_are_built_within_the_limit(learner, monkeypatch):
    limit, limited = process.build_limit, []
    monkeypatch.setattr(process, "build_limit", lambda: limited.append("built") or limit())
    monkeypatch.setattr(ActorLoop, "run", lambda loop: limited.append("run") or (loop.restart() and "done"))
    lockstep = welcome(schema=(*welcome().schema, ArraySpec(name=ACTOR_STATE, dtype="uint8", shape=(-1,))))
    assert actor.main(["--learner", learner(frames(lockstep)).endpoint, "--name", "one"]) == 0
    assert limited == ["built", "run", "built"]


@each_role
def test_a_worker_whose_run_goes_on_with_other_settings_is_built_anew(role, learner, environments, monkeypatch, capsys):
    ends, open_then = [RunChangedError("other settings"), "done"], []

    def run(_):
        open_then.append(len(environments))
        end = ends.pop(0)
        if isinstance(end, RunChangedError):
            raise end
        return end

    monkeypatch.setattr({"actor": ActorLoop, "evaluator": EvaluatorLoop}[role], "run", run)
    welcoming = learner(lambda message: frames(welcome()) if isinstance(message, Hello) else None)
    assert ROOTS[role].main(["--learner", welcoming.endpoint, "--name", "one"]) == 0
    first, *_, last = [message.incarnation for message in welcoming.end() if isinstance(message, Hello)]
    assert last > first
    assert open_then == [1, 1], "those of before were closed"
    assert 'run_changed detail="other settings"' in capsys.readouterr().err


@each_role
@pytest.mark.parametrize("changed", [{"config": '{"run_id": 5}'}, {"signature": "0123"}])
def test_a_welcome_that_the_network_changed_is_requested_once_more(role, changed, learner, environments):
    """Without keys no message is protected: one bad Welcome must not end a worker."""
    welcomes = [welcome(), welcome(**changed)]
    drain = frames(Drain(reason="target reached", deadline_seconds=0.1))
    open_then = {}

    def answer(message):
        if isinstance(message, Hello):
            if message.incarnation in open_then:
                return None  # it is repeated where its answer is late
            open_then[message.incarnation] = len(environments)
            return frames(welcomes.pop() if len(welcomes) > 1 else welcomes[0])
        return drain if isinstance(message, SnapshotWanted) else None

    welcoming = learner(answer)
    assert ROOTS[role].main(["--learner", welcoming.endpoint, "--name", "one"]) == 0
    heard = welcoming.end()
    assert [message.reason for message in heard if isinstance(message, Goodbye)] == ["target reached"]
    first, *_, last = [message.incarnation for message in heard if isinstance(message, Hello)]
    assert last > first
    assert list(open_then.values()) == [0, 0], "the environments of the first attempt were closed before the second"


@pytest.mark.parametrize(("root", "own"), [(actor, []), (policy_server, ["--workers", "1"]), (evaluator, [])])
def test_policies_of_all_but_evaluators_explore(root, own, learner, monkeypatch, capsys):
    def build_policy(*_, context, **__):
        raise ConfigError(f"training={context.training}")

    monkeypatch.setattr("services.acting.policy.build_policy", build_policy)
    assert root.main(["--learner", learner(frames(welcome())).endpoint, "--name", "one", *own]) == 2
    assert capsys.readouterr().err.endswith(f"error: training={root is not evaluator}\n")


def test_a_policy_server_whose_policy_cannot_be_built_says_why_and_opens_no_port(learner, monkeypatch, capsys):
    def build_policy(*_, **__):
        raise ConfigError("the network cannot be built")

    monkeypatch.setattr("services.acting.policy.build_policy", build_policy)
    monkeypatch.setattr(policy_server, "ZmqServer", lambda *_, **__: pytest.fail("it listens"))
    words = ["--learner", learner(frames(welcome())).endpoint, "--workers", "1", "--name", "one"]
    assert policy_server.main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "rookery policy-server: error: the network cannot be built"


@each_role
def test_code_of_an_allowed_package_runs(role, learner):
    """The owner's option alone allows it; the learner is the same."""
    drain = frames(Drain(reason="target reached", deadline_seconds=0.1))
    config = naming("common.envs.probes:counting", lengths=[3])
    env = spec_of(EnvSettings(entry_point="common.envs.probes:counting", kwargs={"lengths": [3]}))
    greeted = frames(welcome(config=config, signature=env.signature))
    welcoming = learner(lambda message: {Hello: greeted, SnapshotWanted: drain}.get(type(message)))
    words = ["--learner", welcoming.endpoint, "--name", "one", "--allow-code", "common.envs.probes"]
    assert ROOTS[role].main(words) == 0
    assert isinstance(welcoming.end()[-1], Goodbye)


@each_role
def test_a_worker_lets_the_learner_go_first(role, learner, monkeypatch):
    raised = []
    monkeypatch.setattr(os, "nice", raised.append)
    answer = frames(Refusal(code="draining", reason="the run is ending", retry=False))
    ROOTS[role].main(["--learner", learner(answer).endpoint, "--name", "one"])
    assert raised == [{"actor": 5, "evaluator": 10}[role]]


@each_role
def test_a_run_that_is_over_ends_the_worker_with_exit_code_0(role, learner, capsys):
    """Restarted by its supervisor just as the run ended: no blame, or the supervisor would give up a run that was solved."""
    answer = frames(Refusal(code="draining", reason="the run is ending", retry=False))
    assert ROOTS[role].main(["--learner", learner(answer).endpoint, "--name", "one"]) == 0
    err = capsys.readouterr().err
    assert "error:" not in err
    assert f'{role}_ended reason="the run is ending"' in err


@each_role
def test_a_wrong_address_is_refused_before_anything_is_waited_for(role, capsys):
    """A typing slip in a manifest."""
    assert ROOTS[role].main(["--learner", "10.0.0.7:5700"]) == 2
    assert "tcp://host:port" in capsys.readouterr().err


@each_role
def test_keys_that_cannot_be_read_are_reported_before_any_wait(role, capsys):
    """A folder that was not mounted."""
    assert ROOTS[role].main(["--learner", "tcp://127.0.0.1:5700", "--keys", "/nowhere"]) == 2
    err = capsys.readouterr().err
    assert err.count("error:") == err.count("\n") == 1
    assert "No such file or directory at /nowhere/worker.key_secret" in err


def stopped_when_refused_twice(guarded, monkeypatch):
    """Stop this process's worker once `guarded` has refused it twice and the worker has logged a failure."""
    signalled, noted, failures = [], threading.Event(), Handshakes.handshake_failures

    def watched(handshakes, now):
        if note := failures(handshakes, now):
            noted.set()
        return note

    monkeypatch.setattr(Handshakes, "handshake_failures", watched)

    def end_when_refused_twice():
        if guarded.transport.handshakes.failed.total() > 1 and noted.is_set() and not signalled:
            signalled.append(os.kill(os.getpid(), signal.SIGTERM))

    guarded.seldom = end_when_refused_twice


@each_role
def test_a_worker_that_is_refused_logs_it_and_retries(role, learner, tmp_path, capsys, monkeypatch):
    """A learner with keys and a worker without: it waits, since the keys may come later, and says what may be wrong."""
    make(tmp_path, ["worker"])
    guarded = learner(None, keys=ServerKeys.of(str(tmp_path / "learner")))
    stopped_when_refused_twice(guarded, monkeypatch)
    assert ROOTS[role].main(["--learner", guarded.endpoint, "--name", "one"]) == 0
    assert guarded.end() == []
    err = capsys.readouterr().err
    assert "handshake_failed times=" in err
    assert "(--keys)" in err


def test_a_policy_server_whose_key_is_not_allowed_ends_with_that_reason(learner, tmp_path, capsys):
    make(tmp_path, ["worker", "unlisted"])
    (tmp_path / "learner" / "unlisted.key").unlink()
    guarded = learner(None, keys=ServerKeys.of(str(tmp_path / "learner")))
    own = ["--keys", str(tmp_path / "unlisted"), "--workers", "1", "policy_server.learner_seconds=1"]
    assert policy_server.main(["--learner", guarded.endpoint, *own]) == 2
    assert guarded.end() == []
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no learner answers" in error
    assert "the learner does not allow key" in error
    assert "start the learner first" not in error


def test_an_env_worker_whose_key_is_not_allowed_names_the_policy_server(learner, tmp_path, capsys, monkeypatch):
    make(tmp_path, ["worker", "unlisted"])
    (tmp_path / "learner" / "unlisted.key").unlink()
    guarded = learner(None, keys=ServerKeys.of(str(tmp_path / "learner")))
    stopped_when_refused_twice(guarded, monkeypatch)
    own = ["--keys", str(tmp_path / "unlisted"), "--name", "one"]
    assert env_worker.main(["--policy-server", guarded.endpoint, *own]) == 0
    err = capsys.readouterr().err
    assert "the policy server does not allow key" in err
    assert "policy_server.keys" in err


@each_role
def test_a_worker_with_keys_is_welcomed_by_a_learner_that_accepts_them(role, learner, tmp_path):
    """From the command line to the socket."""
    make(tmp_path, ["worker"])
    answer = frames(Refusal(code="draining", reason="the run is ending", retry=False))
    guarded = learner(answer, keys=ServerKeys.of(str(tmp_path / "learner")))
    assert ROOTS[role].main(["--learner", guarded.endpoint, "--keys", str(tmp_path / "worker"), "--name", "one"]) == 0
    assert guarded.end()[0].worker == "one"


@each_role
def test_a_worker_on_a_trusted_network_says_so_when_it_starts(role, learner, capsys):
    """The log warns its reader: nothing proves which learner the worker joined."""
    ending = learner(frames(Refusal(code="draining", reason="the run is ending", retry=False)))
    assert ROOTS[role].main(["--learner", ending.endpoint, "--name", "one", "--insecure"]) == 0
    assert f"insecure learner={ending.endpoint}" in capsys.readouterr().err


@each_role
def test_sigterm_before_a_learner_answered_ends_well(role, learner, capsys):
    """A pod is moved to another node while its learner is not up yet."""

    def end(_):
        if len(silent.heard) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    silent = learner(end)
    assert ROOTS[role].main(["--learner", silent.endpoint, "--name", "one"]) == 0
    assert {type(message) for message in silent.end()} == {Hello}
    assert f"{role}_ended reason=SIGTERM" in capsys.readouterr().err


def test_a_policy_server_waits_for_a_learner_that_answers_with_refusals(learner, monkeypatch, capsys):
    """All slots are taken, for longer than it waits for an answer: time passes with each of 15 alone."""
    now = [0.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns))
    monkeypatch.setattr(worker.WorkerSide, "FULL_SECONDS", 0.0)

    def refuse(_):
        now[0] += 0.4
        if len(full.heard) == 15:
            os.kill(os.getpid(), signal.SIGTERM)
        return frames(Refusal(code="full", reason="all slots have an actor", retry=True))

    full = learner(refuse)
    assert policy_server.main(["--learner", full.endpoint, "--workers", "1", "policy_server.learner_seconds=1"]) == 0
    err = capsys.readouterr().err
    assert "all slots have an actor" in err
    assert "no_learner_yet" not in err


@each_role
def test_a_welcomed_worker_sends_a_goodbye_with_the_reason_of_its_end(role, learner, capsys):
    """Under the name and role it greeted with, so that the learner can close its account; the log has the run."""
    drain = frames(Drain(reason="target reached", deadline_seconds=0.1))
    welcoming = learner(lambda message: {Hello: frames(welcome()), SnapshotWanted: drain}.get(type(message)))
    assert ROOTS[role].main(["--learner", welcoming.endpoint, "--name", "one"]) == 0
    heard = welcoming.end()
    assert (heard[0].role, heard[0].worker) == (role, "one")
    assert [message.reason for message in heard if isinstance(message, Goodbye)] == ["target reached"]
    assert f" welcomed run=run-1 learner={welcoming.endpoint} slot=" in capsys.readouterr().err


@each_role
def test_a_worker_with_linger_outlives_the_run_until_sigterm(role, learner, monkeypatch):
    """Restarted at each end, a pod would have longer and longer delays."""
    lingering, lingered = process.linger, []

    def linger(shutdown, health, **given):
        lingered.append(role)
        os.kill(os.getpid(), signal.SIGTERM)
        lingering(shutdown, health, **given)
        assert shutdown.reason == "SIGTERM"

    monkeypatch.setattr(process, "linger", linger)
    drain = frames(Drain(reason="target reached", deadline_seconds=0.1))
    welcoming = learner(lambda message: {Hello: frames(welcome()), SnapshotWanted: drain}.get(type(message)))
    assert ROOTS[role].main(["--learner", welcoming.endpoint, "--name", "one", "--linger"]) == 0
    assert isinstance(welcoming.end()[-1], Goodbye)
    assert lingered == [role]


@each_role
@pytest.mark.parametrize("found", ["welcome", "full"])
def test_a_worker_that_lingers_ends_where_another_run_is_under_way(role, found, learner, monkeypatch, capsys):
    """Nothing else would end it: where the run was changed, an orchestrator restarts the learner alone, and then this process."""
    monkeypatch.setattr(worker, "GREET_SECONDS", 0.01)
    monkeypatch.setattr(worker, "ANSWER_SECONDS", 300.0)
    over = frames(Refusal(code="draining", reason="the run is ending", retry=False))
    full = frames(Refusal(code="full", reason="all slots are taken", retry=True))
    answers, given = iter([frames(welcome()), over, over, {"welcome": frames(welcome()), "full": full}[found]]), {}
    drain = frames(Drain(reason="target reached", deadline_seconds=0.1))

    def answer(message):
        if isinstance(message, Hello) and message.incarnation not in given:  # it is repeated where its answer is late
            given[message.incarnation] = next(answers, None)
        return given[message.incarnation] if isinstance(message, Hello) else {SnapshotWanted: drain}.get(type(message))

    next_run = learner(answer)
    assert ROOTS[role].main(["--learner", next_run.endpoint, "--name", "one", "--linger"]) == 0
    heard = next_run.end()
    assert len({message.incarnation for message in heard if isinstance(message, Hello)}) == 4
    goodbyes = [message.reason for message in heard if isinstance(message, Goodbye)]
    assert goodbyes == ["target reached", "it has ended, and its successor joins"][: 2 if found == "welcome" else 1]
    err = capsys.readouterr().err
    assert "run_found" in err
    assert "WARNING refused code=draining" not in err


@each_role
def test_without_a_name_it_gets_one_that_no_other_process_has(role, learner):
    """Eight actors on one machine, started by a loop in a shell."""
    answer = frames(Refusal(code="draining", reason="the run is ending", retry=False))
    one = learner(answer)
    assert ROOTS[role].main(["--learner", one.endpoint]) == 0
    assert one.end()[0].worker.startswith(f"{role}-")
    assert one.heard[0].worker.endswith(f"-{os.getpid()}")


def test_readiness_follows_the_learner_until_the_run_is_over(learner):
    """A drain of a node waits for ready pods: an actor without a learner is not ready, at the end of its run it is."""
    away, over, answers = threading.Event(), threading.Event(), []

    def answer(message):
        if away.is_set():
            return None
        if isinstance(message, Hello):
            return frames(welcome(heartbeat=0.05))
        return frames(Drain(reason="target reached", deadline_seconds=0.1)) if over.is_set() else None

    class Waiter:
        """Does nothing but stay in touch with its learner."""

        def __init__(self, welcomed, _stats):
            self.link, self.ready = welcomed.link, welcomed.health.readiness

        def wait(self, happened):
            while not happened(answered := self.ready()):
                self.link.service(0.02)
            answers.append((answered.ok, answered.sentence))

        def run(self):
            self.wait(lambda answered: answered.ok)
            away.set()
            self.wait(lambda answered: not answered.ok)
            away.clear()
            self.wait(lambda answered: answered.ok)
            over.set()
            self.wait(lambda answered: answered.ok and self.link.drain)
            away.set()
            while self.link.joined:
                self.link.service(0.02)
            self.wait(lambda _: True)
            return "done"

    endpoint = learner(answer).endpoint
    words = ["--learner", endpoint, "--name", "one"]
    assert worker.main("actor", words, stats=ActorStats(), metrics=ACTOR_METRICS, build=Waiter) == 0
    well = (True, "ok")
    assert answers == [well, (False, f"no learner at {endpoint}"), well, well, well]


def test_a_worker_that_takes_a_minute_to_build_its_environments_is_healthy(learner, monkeypatch):
    """A simulator loads its maps: a probe that restarts the actor meanwhile would restart it for ever."""
    answers = []

    class Slow:
        """Looks at its own health as if a minute had passed, and has nothing to do."""

        def __init__(self, welcomed, _stats):
            monkeypatch.setattr(welcomed.health, "_clock", lambda: time.monotonic() + 60.0)
            answers.append(welcomed.health.liveness().ok)

        def run(self):
            return "done"

    words = ["--learner", learner(frames(welcome())).endpoint, "--name", "one"]
    assert worker.main("actor", words, stats=ActorStats(), metrics=ACTOR_METRICS, build=Slow) == 0
    assert answers == [True]


def test_a_policy_server_whose_network_takes_a_minute_is_healthy(learner, monkeypatch):
    """As an actor is: a probe that restarts it meanwhile would restart it for ever."""
    answers = []

    def run(loop):
        loop.alive(doing="steps its environments", within=BUILD_SECONDS)
        health = loop.alive.__self__._worker.health
        monkeypatch.setattr(health, "_clock", lambda: time.monotonic() + 60.0)
        answers.append(health.liveness().ok)
        return "done"

    monkeypatch.setattr(ActorLoop, "run", run)
    words = ["--learner", learner(frames(welcome())).endpoint, "--name", "one", "--bind", "tcp://127.0.0.1:0", "--workers", "2"]
    assert policy_server.main(words) == 0
    assert answers == [True]


@pytest.mark.parametrize(("has", "logged"), [("fp32", True), ("bf16", False)])
def test_acting_in_bfloat16_on_a_processor_without_it_is_logged(learner, monkeypatch, capsys, has, logged):
    """It acts in float32, several times as fast as it would emulate bfloat16."""
    monkeypatch.setattr(arithmetic, "native", lambda *_: has)

    class Builder:
        """Builds its policy, and has nothing to do."""

        def __init__(self, welcomed, _stats):
            policy_of(welcomed, spec_of(welcomed.run.env), num_envs=1, training=True)

        def run(self):
            return "done"

    settings = Settings(actor=ActorSettings(precision="bf16"))
    config = RunConfig.of(settings, run_id="run-1").model_dump_json()
    words = ["--learner", learner(frames(welcome(config=config))).endpoint, "--name", "one"]
    assert worker.main("actor", words, stats=ActorStats(), metrics=ACTOR_METRICS, build=Builder) == 0
    assert ("no_bfloat16 setting=actor.precision" in capsys.readouterr().err) == logged


@pytest.mark.parametrize(
    ("role", "name", "rank"), [("actor", "actor-0", 0), ("actor", "actor-3", 1), ("actor", "actor-x", 0), ("evaluator", "e-1", 0)]
)
def test_a_worker_belongs_to_the_rank_that_its_name_gives(role, name, rank):
    addresses = "tcp://a:1,tcp://b:2"
    assert worker.rank_address(addresses, role=role, name=name, numbered=True) == addresses.split(",")[rank]
    assert worker.rank_address("tcp://a:1", role=role, name=name, numbered=True) == "tcp://a:1"


def test_names_that_end_with_process_ids_are_spread_over_ranks():
    """In containers all of them are 1."""
    names = [f"actor-{host:x}-1" for host in range(0xA000, 0xA040)]
    ranks = [worker.rank_address("tcp://a:1,tcp://b:2", role="actor", name=name, numbered=False) for name in names]
    assert 16 < ranks.count("tcp://a:1") < 48
    ranks = [
        worker.rank_address("tcp://a:1,tcp://b:2", role="actor", name=f"actor-here-{pid}", numbered=False) for pid in range(64)
    ]
    assert ranks.count("tcp://a:1") == 32
