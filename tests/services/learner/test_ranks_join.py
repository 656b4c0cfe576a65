"""Ranks that cannot train together: each ends with one line."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from common.config.endpoint import Endpoint
from common.envs.spec import EnvSettings
from common.envs.trial import spec_of
from common.errors import ConfigError
from services.learner import ranks as module
from services.learner.ranks import check_address, check_alike, check_same_data
from services.learner.startup import parse
from tests.ranks import on_every_rank

pytestmark = pytest.mark.service

ENV = spec_of(EnvSettings(entry_point="common.envs.probes:counting"))


def facts(*words):
    return module._facts(parse(["--config", "cartpole", "learner.ranks=2", *words], {}))


@pytest.mark.parametrize(
    ("words", "name"), [("learner.batch=7", "learner.batch"), ("env.num_envs=3", "env.num_envs"), ("run.seed=9", "run.seed")]
)
def test_ranks_of_other_settings_are_refused(words, name):
    with pytest.raises(ConfigError, match=rf"the ranks of the learner differ in {name}: found .* at rank 0 and .* at rank 1"):
        check_alike([facts(), facts(words)])


def test_ranks_may_differ_in_addresses_and_folders():
    own = ("learner.bind=tcp://127.0.0.1:0", "metrics.port=9", "run.dir=mine", "log.format=json", "learner.ranks_seconds=5")
    check_alike([facts(), facts(*own)])


@pytest.mark.parametrize("package", ["rookery", "torch"])
def test_ranks_of_other_versions_are_refused(package):
    other = facts() | {f"the version of {package}": "0.0"}
    with pytest.raises(ConfigError, match=rf"differ in the version of {package}: found .* at rank 0 and 0.0 at rank 1"):
        check_alike([facts(), other])


@pytest.mark.parametrize("differs", ["the environment", "the run of their checkpoints", "their weights"])
def test_ranks_that_begin_with_other_data_are_refused(differs):
    """Another release of an environment, or the folder of another run: found before the first update."""

    def work(ranks):
        other = differs if ranks.index else ""
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, 2.0 if other == "their weights" else 1.0)
        torch.nn.init.zeros_(model.bias)
        env = replace(ENV, frame_skip=7) if other == "the environment" else ENV
        run = "run-2" if other == "the run of their checkpoints" else "run-1"
        with pytest.raises(
            ConfigError, match=f"the ranks of the learner differ in {differs}: found .* at rank 0 and .* at rank 1"
        ):
            check_same_data(ranks, env=env, run_id=run, model=model)

    on_every_rank(2, work)


def test_ranks_of_the_same_data_may_begin():
    model = torch.nn.Linear(2, 2)

    def work(ranks):
        check_same_data(ranks, env=ENV, run_id="run-1", model=model)

    on_every_rank(2, work)


def test_ranks_connect_over_a_network_only_where_it_is_trusted():
    """Their connections have no keys, also where the workers have."""
    check_address(Endpoint("127.0.0.1", 29500), insecure=False)
    check_address(Endpoint("learner-0.learner-headless", 29500), insecure=True)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: .* found 10.0.0.7, wanted .*, or learner.insecure=true"):
        check_address(Endpoint("10.0.0.7", 29500), insecure=False)


def test_ranks_on_a_network_are_refused_before_they_look_for_each_other():
    invocation = parse(["--config", "cartpole", "learner.ranks=2"], {})
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match=r"learner\.insecure=true"), module.join_ranks(invocation, variables):
        pass


def test_the_ranks_of_one_machine_are_counted_without_the_variables_of_a_launcher(monkeypatch):
    """They share its memory."""

    class Group:
        def gather_json(self, value):
            return [value, value, {**value, "memory": "that of another machine"} if "memory" in value else value]

    monkeypatch.setattr(module, "process_group", lambda *_, **__: nullcontext(Group()))
    invocation = parse(["--config", "cartpole", "learner.ranks=3", "run.id=one"], {})
    variables = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with module.join_ranks(invocation, variables) as joined:
        assert joined.local_ranks == 2
