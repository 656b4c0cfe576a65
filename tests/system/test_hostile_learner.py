"""A learner that names code of its own choice, against real workers: nothing of it runs, and one line says what was refused."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from common.algorithms.registry import rollout_schema
from common.config.run_config import RunConfig
from common.config.schema import Settings
from common.envs.trial import spec_of
from common.protocol import codec
from common.protocol.messages import Envelope, Hello, Welcome
from common.transport.zmq import ZmqServer

pytestmark = pytest.mark.system

PLANTED = "import pathlib\npathlib.Path({file!r}).touch()\n"


def hostile(changes):
    """A Welcome that fits every worker in all but `changes`, by section, to the run's configuration."""
    settings = Settings()
    values = json.loads(RunConfig.of(settings, run_id="run-1").model_dump_json())
    for section, change in changes.items():
        values[section] |= change
    env = spec_of(settings.env)
    welcome = Welcome(
        index=0,
        generation=0,
        config=json.dumps(values),
        env_signature=env.signature,
        schema=rollout_schema(
            settings.algorithm, model=settings.model, env=env, length=settings.rollout.length, num_envs=settings.env.num_envs
        ),
        credits=1,
        version=-1,
        heartbeat_seconds=1.0,
    )
    return codec.encode(Envelope(run="run-1", message=welcome))


def test_no_code_runs_that_the_owner_of_a_worker_did_not_allow(colony, wait):
    """A shell command as environment, a module as network; each leaves a file if it runs.

    Other settings that name code are in tests/services/test_allowed_code.py.
    """
    attacks = {
        "shell": ("actor", {"env": {"entry_point": "os:system", "kwargs": {"command": "touch shell"}}}),
        "network": ("evaluator", {"model": {"entry_point": "network:Net"}}),
    }
    for name in attacks:
        (colony.folder / f"{name}.py").write_text(PLANTED.format(file=name))
    with closing(ZmqServer(colony.endpoint, linger=0.5)) as learner:
        workers = {
            name: colony.start(f"services.{role}", "--learner", colony.endpoint, "--name", name)
            for name, (role, _) in attacks.items()
        }
        for worker in workers.values():
            worker.may_end = True

        def all_ended():
            while arrived := learner.receive(0.0):
                message = codec.decode(arrived[1]).message
                if isinstance(message, Hello):
                    learner.send(arrived[0], hostile(attacks[message.worker][1]))
            return all(worker.process.poll() is not None for worker in workers.values())

        wait(all_ended, "every worker has ended")
    for name, (role, changes) in attacks.items():
        (section, change) = next(iter(changes.items()))
        key, value = next(iter(change.items()))
        worker = workers[name]
        assert not (colony.folder / name).exists(), name
        assert worker.ended() == 2, worker.output
        assert "Traceback" not in worker.output
        (line,) = [line for line in worker.output.splitlines() if "error:" in line]
        module = value.partition(":")[0]
        assert line == (
            f"rookery {role}: error: the learner at {colony.endpoint} names code that the owner of this {role} did not allow: "
            f"found {section}.{key} {value!r} (module {module!r}), wanted a module of {role}.allow_code (none), or a value of "
            f"this {role}'s own settings; if you trust that learner, start with --allow-code {module}"
        )
