"""The plan of a run."""

import re
import shutil
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from common.config.endpoint import parse_endpoint
from common.config.load import load_settings
from common.errors import ConfigError, ResourceError, RookeryError
from common.runtime.checkpoint_files import Checkpoint, read
from common.runtime.checkpoints import CheckpointStore
from common.runtime.run_directory import held
from common.runtime.store import RunStore
from common.transport.curve import ServerKeys, WorkerKeys, make
from services.cli.train.instructions import Start
from services.cli.train.plan import Request, make_plan, max_actors
from services.cli.train.ports import Ports, binds

pytestmark = [pytest.mark.service, pytest.mark.usefixtures("first_port")]

NOW = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


def planned(*overrides, preset="cartpole", environ=None, **request):
    """A plan as `rookery train` makes it, of a run that has ended since."""
    with planning(*overrides, preset=preset, environ=environ, **request) as plan:
        return plan


def planning(*overrides, preset="cartpole", environ=None, **request):
    """The same while the run goes on."""
    asked = Request(preset=preset, overrides=overrides, **request)
    return make_plan(asked, environ=environ or {}, command_line=["rookery", "train", "cartpole"], now=NOW)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Runs go to a folder of their own."""
    monkeypatch.chdir(tmp_path)


def test_a_run_directory_holds_all_that_its_services_read():
    """A child is given one file; what that file says is what the run does, addresses included."""
    plan = planned("run.seed=7")
    assert plan.directory.path == Path("runs/cartpole-20261120-120000-s7")
    assert plan.directory.command.read_text() == "rookery train cartpole\n"
    saved = load_settings(preset=str(plan.directory.config), environ={}).settings
    assert saved == plan.settings
    assert saved.run.preset == "cartpole"
    assert saved.run.id.startswith("cartpole-20261120-120000-")
    assert saved.actor.learner == saved.evaluator.learner == saved.learner.bind != "tcp://127.0.0.1:5700"
    assert "chosen for this run" in plan.directory.config.read_text()


def test_a_run_of_another_environment_has_it_in_its_directory_its_id_and_its_titles():
    plan = planned("env.id=Acrobot-v1", "run.seed=7")
    assert plan.directory.path == Path("runs/Acrobot-v1-ppo-20261120-120000-s7")
    assert plan.settings.run.id.startswith("Acrobot-v1-ppo-20261120-120000-")
    assert (plan.title, plan.curve_title) == ("Acrobot-v1-ppo, seed 7", "Acrobot-v1, ppo, seed 7")
    assert plan.loaded.notes[0].startswith("inherited from preset cartpole, which is for CartPole-v1 and not for Acrobot-v1: ")


def test_a_value_without_effect_is_refused_on_the_command_line_of_a_run_and_named_where_a_series_combined_it():
    dead = "algorithm.lr_schedule=constant", "algorithm.lr_final=1e-5"
    with pytest.raises(ConfigError, match=r"algorithm\.lr_final: found 1e-05 \(command line\), which has no effect where"):
        planned(*dead)
    assert not Path("runs").exists()
    (note,) = planned(*dead, member=True).loaded.notes
    assert note.endswith("(command line): algorithm.lr_final=1e-05")


def test_a_run_that_began_with_settings_that_are_refused_today_is_resumed():
    plan = planned(preset="cartpole-dqn")
    config = plan.directory.config
    text = config.read_text().replace("  target_every: 1 ", "  target_every: 20 ")
    config.write_text(re.sub("  target_rate: [^ ]*", "  target_rate: 0.005", text))
    with pytest.raises(ConfigError, match=r"target_rate: found 0\.005, wanted 1 where"):
        planned("algorithm.target_every=20", "algorithm.target_rate=0.005", preset="cartpole-dqn")
    (note,) = planned(preset=None, run_dir=plan.directory.path, resume=True).loaded.notes
    assert note.startswith("algorithm.target_rate: found 0.005, wanted 1 where algorithm.target_every is 20: ")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), []),
        (("actor.count=2", "learner.ranks=2", "learner.ranks_seconds=null"), []),
        (("actor.count=2", "learner.ranks=2", "learner.ranks_seconds=9"), ["learner.ranks_seconds=9"]),
        (("actor.name=mine",), ["actor.name=mine"]),
        (
            ("policy_server.workers=2", "policy_server.bind=tcp://127.0.0.1:5800", "env_worker.policy_server=tcp://[::1]:5800"),
            ["env_worker.policy_server=tcp://[::1]:5800", "policy_server.bind=tcp://127.0.0.1:5800"],
        ),
        (("policy_server.workers=2", "policy_server.learner_seconds=9"), ["policy_server.learner_seconds=9"]),
        (("policy_server.workers=2", "env_worker.name=w", "evaluator.name=e"), ["env_worker.name=w", "evaluator.name=e"]),
        (("actor.count=0", "evaluator.enabled=false", "actor.name=a", "evaluator.name=e", "env_worker.name=w"), []),
    ],
)
def test_values_that_each_process_gets_another_of_are_named(overrides, named):
    notes = planned(*overrides).loaded.notes
    listed = ", ".join(f"{each} (command line)" for each in named)
    assert notes == ((f"`rookery train` sets these for each process itself, in place of: {listed}",) if named else ())


def test_a_directory_may_look_like_a_setting():
    """As those of a series do."""
    assert planned(run_dir=Path("learning_rate=1e-3-s1/actor.name=mine")).loaded.notes == ()


def test_two_runs_side_by_side_share_no_address():
    """Two terminals, one machine, no settings."""
    with planning(run_dir=Path("a")) as one, planning(run_dir=Path("b")) as other:
        assert one.settings.run.id != other.settings.run.id
        assert not set(all_ports(one)) & set(all_ports(other))


def test_an_address_that_the_user_chose_stays_and_is_reached_from_here():
    """A learner for the whole network: its own actors still come over loopback."""
    plan = planned("learner.bind=tcp://0.0.0.0:5999", "learner.insecure=true")
    assert plan.settings.learner.bind == "tcp://0.0.0.0:5999"
    assert plan.settings.actor.learner == "tcp://127.0.0.1:5999"
    assert not plan.settings.actor.insecure


def test_workers_of_this_machine_go_without_keys_where_its_learner_may():
    """Bound to one address, such as that of an interface, a learner is reached there by its own workers too."""
    plan = planned("learner.bind=tcp://lo:0", "learner.insecure=true")
    for own in (plan.settings.actor, plan.settings.evaluator):
        assert own.learner == plan.settings.learner.bind
        assert own.insecure
    assert load_settings(preset=str(plan.directory.config), environ={}).settings == plan.settings


def test_a_run_with_keys_gives_each_child_its_folder_and_no_secret():
    """A learner for the whole network: actors of this machine have keys like all others. Paths are written down, keys are not."""
    make(Path("keys"), ["worker"])
    both = "actor.keys=keys/worker", "evaluator.keys=keys/worker"
    plan = planned("learner.bind=tcp://0.0.0.0:0", "learner.keys=keys/learner", *both)
    text = plan.directory.config.read_text()
    assert f"keys: {Path('keys/learner').absolute()}  # command line\n" in text  # absolute, for a resume from another folder
    assert text.count(f"keys: {Path('keys/worker').absolute()}  # command line\n") == 2
    assert load_settings(preset=str(plan.directory.config), environ={}).settings == plan.settings
    for name, kind in (("learner", ServerKeys), ("worker", WorkerKeys)):
        assert kind.of(f"keys/{name}").secret.decode() not in text


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["learner.keys=a/learner"], r"actor.keys and learner.keys: found none and a/learner, wanted keys on both sides"),
        (["learner.keys=a/learner", "actor.keys=a/worker"], r"evaluator.keys and learner.keys: found none and a/learner"),
        (["actor.keys=a/worker"], r"actor.keys and learner.keys: found a/worker and none"),
        (
            ["learner.keys=a/learner", "actor.keys=b/worker"],
            r"would refuse actor.keys: found b/worker, wanted keys that a/learner",
        ),
        (["learner.keys=a/learner", "actor.keys=a/unlisted"], r"would refuse actor.keys: found a/unlisted"),
        (["learner.keys=nowhere"], r"No such file or directory at nowhere/learner.key_secret"),
    ],
)
def test_keys_with_which_a_run_would_wait_for_ever_are_refused_before_anything_is_written(overrides, says):
    """Both ends are this machine's: what does not fit together is known before the start."""
    make(Path("a"), ["worker", "unlisted"])
    make(Path("b"), ["worker"])
    Path("a/learner/unlisted.key").unlink()
    with pytest.raises(ConfigError, match=says) as caught:
        planned(*overrides, run_dir=Path("r"))
    assert caught.value.exit_code == 2
    assert not Path("r").exists()


def test_a_run_without_workers_needs_only_the_learners_keys():
    """All actors are on other machines."""
    make(Path("keys"), ["worker"])
    plan = planned("learner.keys=keys/learner", "actor.count=0", "evaluator.enabled=false")
    assert plan.settings.learner.keys == str(Path("keys/learner").absolute())


def test_actors_that_go_through_a_proxy_keep_its_address():
    """A fault proxy between actors and learner, as in a test of bad networks."""
    plan = planned("learner.bind=tcp://127.0.0.1:5999", "actor.learner=tcp://127.0.0.1:6000")
    assert plan.settings.actor.learner == "tcp://127.0.0.1:6000"
    assert plan.settings.evaluator.learner == "tcp://127.0.0.1:5999"


def test_port_zero_means_any_free_one_that_a_restarted_learner_finds_again():
    """Left to the learner, each restart would bind another port and the actors would never find it."""
    host, _, port = planned("learner.bind=tcp://127.0.0.1:0").settings.learner.bind.rpartition(":")
    assert host == "tcp://127.0.0.1"
    assert int(port) > 0


def test_metrics_ports_count_up_from_the_one_asked_for():
    """A Prometheus with fixed targets."""
    with Ports() as ports:
        first = ports.find(4, in_a_row=True)[0]
    plan = planned(f"metrics.port={first}", "actor.count=2", "metrics.host=0.0.0.0")
    assert plan.metrics_ports == {"learner": first, "evaluator": first + 1, "actor-0": first + 2, "actor-1": first + 3}
    assert plan.urls["actor-1"] == f"http://127.0.0.1:{first + 3}"
    with pytest.raises(ConfigError, match="found 65534, wanted at most 65532"):
        planned("metrics.port=65534", "actor.count=2")


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("key", ["metrics.port={0}", "learner.bind=tcp://127.0.0.1:{2}"])
def test_a_port_in_use_is_reported_before_anything_is_written(key, resume):
    """Another run has it: the error names the setting, and comes before any service starts."""
    before = planned(run_dir=Path("before"))
    written = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    with Ports() as ports:
        ports.claim(parse_endpoint(before.settings.learner.bind).port)  # which the resumed run has again
        first = ports.find(4, in_a_row=True)[0]
    request = {"run_dir": Path("before"), "preset": None, "resume": True} if resume else {"run_dir": Path("new")}
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 2))
        other.listen()
        with pytest.raises(ResourceError, match=r"in use") as caught:
            planned(key.format(*range(first, first + 4)), "actor.count=2", **request)
    assert f"127.0.0.1:{first + 2}" in str(caught.value)
    assert caught.value.exit_code == 2
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == written
    assert not Path("new").exists()


def test_a_run_that_is_under_way_is_not_resumed():
    """Its learner has the folder, and its ports as well: the first is what to say."""
    first = planned("metrics.port=0", run_dir=Path("r"))
    with held(first.directory), pytest.raises(ConfigError, match="a run is under way in this directory"):
        planned(run_dir=Path("r"), preset=None, resume=True)
    assert planned(run_dir=Path("r"), preset=None, resume=True).resume


def test_a_run_is_resumed_on_a_full_disk_with_the_settings_it_has(no_room):
    """Its config.yaml cannot be replaced and need not be; a setting that is changed would reach no service."""
    before = planned(run_dir=Path("r"))
    with no_room():
        assert planned(run_dir=Path("r"), preset=None, resume=True).settings == before.settings
        with pytest.raises(
            ResourceError, match=r"the changed settings cannot be written: found File too large at r/config\.yaml"
        ):
            planned("checkpoint.keep=9", run_dir=Path("r"), preset=None, resume=True)
        with pytest.raises(ResourceError, match="run directory cannot be written: found File too large"):
            planned(run_dir=Path("new"))
    assert sorted(path.name for path in Path().iterdir()) == ["r"]


def test_a_run_is_not_resumed_with_another_seed():
    """Its weights and its environments come from the first one: it would only be labelled with the second."""
    planned("run.seed=4", run_dir=Path("r"))
    assert planned("run.seed=4", run_dir=Path("r"), preset=None, resume=True).settings.run.seed == 4
    with pytest.raises(ConfigError, match=r"run.seed of a run that goes on: found 9, wanted 4; leave it out"):
        planned("run.seed=9", run_dir=Path("r"), preset=None, resume=True)


@pytest.mark.parametrize(("first", "second"), [("", "there"), ("there", ""), ("there", "elsewhere")])
def test_a_run_with_weights_of_its_own_is_not_resumed_with_those_of_another(first, second):
    """They would have no effect, and a comparison would take the run for another configuration."""
    planned(f"run.init={first}", run_dir=Path("r"))
    again = {"run_dir": Path("r"), "preset": None, "resume": True}
    assert planned(f"run.init={second}", **again).settings.run.init == second, "before a checkpoint they have an effect"
    planned(f"run.init={first}", **again)
    Path("r/checkpoints/checkpoint-000000000001").mkdir(parents=True)
    before = Path("r/config.yaml").read_bytes()
    found, wanted = second or "none", first or "none"
    with pytest.raises(ConfigError, match=rf"run\.init of a run that goes on: found {found}, wanted {wanted}; leave it out"):
        planned(f"run.init={second}", **again)
    assert Path("r/config.yaml").read_bytes() == before
    assert planned(f"run.init={first}", **again).settings.run.init == planned(**again).settings.run.init == first


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_has_the_lock_of_its_directory_for_its_whole_life(resume):
    """Also while its learner is dead and about to be restarted: a second one would take over its actors."""
    if resume:
        planned(run_dir=Path("r"))
    with planning(run_dir=Path("r"), preset=None if resume else "cartpole", resume=resume):
        before = Path("r/config.yaml").read_bytes()
        for attempt in ({"preset": None, "resume": True}, {"preset": "cartpole"}):
            with pytest.raises(ConfigError, match="a run is under way in this directory"):
                planned("checkpoint.keep=9", run_dir=Path("r"), **attempt)
        assert Path("r/config.yaml").read_bytes() == before
    assert planned(run_dir=Path("r"), preset=None, resume=True).resume


def test_children_get_their_names_and_a_restarted_learner_resumes():
    """The command lines of the three services."""
    plan = planned(run_dir=Path("r"))
    port, lock = plan.metrics_ports, ("--run-lock", str(plan.lock))
    assert plan.command(Start("learner"))[1:] == [
        *("-P", "-m", "services.learner", "--config", "r/config.yaml", "--run-dir", "r", *lock, f"metrics.port={port['learner']}")
    ]
    assert "--resume" in plan.command(Start("learner", resume=True))
    assert plan.command(Start("actor-0"))[3:] == [
        *("services.actor", "--config", "r/config.yaml", "--name", "actor-0", f"metrics.port={port['actor-0']}")
    ]


def test_a_resumed_run_keeps_its_settings_its_name_and_its_address():
    """Stopped yesterday, continued today, with one setting changed."""
    before = planned("env.num_envs=16", run_dir=Path("r"))
    after = planned("checkpoint.keep=9", preset=None, run_dir=Path("r"), resume=True)
    assert after.resume
    assert after.settings.checkpoint.keep == 9
    assert after.settings.model_copy(update={"checkpoint": before.settings.checkpoint}) == before.settings
    assert yaml.safe_load(Path("r/config.yaml").read_text())["checkpoint"]["keep"] == 9


def test_env_workers_connect_to_the_policy_server_of_their_number():
    plan = planned("policy_server.workers=2", "actor.count=2", "evaluator.enabled=false")
    servers, metrics = plan.policy_servers, plan.metrics_ports
    ports = {*(server.port for server in servers.values()), *metrics.values(), parse_endpoint(plan.settings.learner.bind).port}
    assert len(ports) == 2 + 7 + 1  # all different
    assert set(plan.urls) == {"learner", "actor-0", "actor-1"}  # env workers are not in the learner's session
    assert plan.command(Start("actor-1"))[3:] == [
        *("services.policy_server", "--config", str(plan.directory.config), "--name", "actor-1"),
        *(f"policy_server.bind={servers['actor-1']}", "policy_server.learner_seconds=null"),
        f"metrics.port={metrics['actor-1']}",
    ]
    assert plan.command(Start("env_worker-1-0"))[3:] == [
        *("services.env_worker", "--config", str(plan.directory.config), "--name", "env_worker-1-0"),
        *(f"env_worker.policy_server={servers['actor-1']}", f"metrics.port={metrics['env_worker-1-0']}"),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy_server.workers=3"], r"policy_server.workers: found 3, wanted a divisor of env.num_envs = 8"),
        (["policy_server.workers=16"], r"policy_server.workers: found 16, wanted a divisor of env.num_envs = 8"),
        (["policy_server.workers=2", "run.mode=lockstep"], "wanted 0 where run.mode is lockstep"),
        (["policy_server.bind=tcp://0.0.0.0:5800"], "policy_server.bind: found tcp://0.0.0.0:5800"),
        (["env_worker.policy_server=tcp://10.0.0.1:5800"], "env_worker.policy_server: found tcp://10.0.0.1:5800"),
    ],
)
def test_settings_with_which_env_workers_cannot_work_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        planned(*overrides)


@pytest.mark.parametrize(
    ("setting", "searched"), [("policy_server.workers=2", "policy servers"), ("run.mode=lockstep", "actors")]
)
def test_a_number_that_cannot_change_during_a_run_is_not_searched_for(setting, searched):
    with pytest.raises(ConfigError, match=f"the number of {searched} cannot be searched for: found --actors auto with {setting}"):
        planned(setting, auto_actors=True)


def test_a_search_in_lockstep_is_refused_by_its_mode_where_the_learner_has_several_ranks():
    with pytest.raises(ConfigError, match=r"found --actors auto with run\.mode=lockstep, wanted --actors N"):
        planned("run.mode=lockstep", "learner.ranks=2", auto_actors=True)


def test_the_directory_of_a_run_keeps_the_command_line_of_each_start():
    planned(run_dir=Path("r"))
    planned(run_dir=Path("r"), preset=None, resume=True)
    assert Path("r/command.txt").read_text() == 2 * "rookery train cartpole\n"


def test_a_start_that_was_refused_leaves_neither_its_settings_nor_its_command():
    planned(run_dir=Path("r"))
    before = {path: path.read_bytes() for path in Path("r").iterdir()}
    planned("model.hidden=[8]", run_dir=Path("r"), preset=None, resume=True).withdraw()
    assert {path: path.read_bytes() for path in Path("r").iterdir()} == before


def test_a_resumed_run_that_is_moved_takes_its_workers_along():
    """Its port is taken meanwhile, so it is given another: its own file still has the old one for the actors."""
    planned(run_dir=Path("r"))
    moved = planned("learner.bind=tcp://127.0.0.1:5999", preset=None, run_dir=Path("r"), resume=True).settings
    assert moved.actor.learner == moved.evaluator.learner == moved.learner.bind == "tcp://127.0.0.1:5999"
    again = planned(preset=None, run_dir=Path("r"), resume=True).settings
    assert again.actor.learner == again.learner.bind == "tcp://127.0.0.1:5999"


def test_a_resumed_run_that_is_moved_leaves_a_proxy_that_is_named_with_it():
    """Both addresses are given: what is said of the actors stands."""
    planned(run_dir=Path("r"))
    words = ("learner.bind=tcp://127.0.0.1:5999", "actor.learner=tcp://127.0.0.1:6000")
    moved = planned(*words, preset=None, run_dir=Path("r"), resume=True).settings
    assert (moved.actor.learner, moved.evaluator.learner) == ("tcp://127.0.0.1:6000", "tcp://127.0.0.1:5999")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"preset": "pogn"}, "unknown preset"),
        ({"overrides": ("env.num_envs=0",)}, "env.num_envs"),
        ({"resume": True}, "no run to resume: found --resume alone"),
        ({"resume": True, "run_dir": Path("nothing")}, "no run to resume"),
        ({"resume": True, "run_dir": Path("of-pong")}, "another preset: found pong in of-pong, wanted cartpole"),
        ({"run_dir": Path("of-pong")}, "in use"),
        ({"run_dir": Path("a-file/inside")}, "cannot be written"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(request_, message):
    """A slip of the finger must not leave a run directory behind."""
    planned(preset="pong", run_dir=Path("of-pong"))
    Path("a-file").touch()
    before = sorted(Path().rglob("*"))
    request = Request(**{"preset": "cartpole", **request_})
    with pytest.raises(RookeryError, match=message) as caught, make_plan(request, environ={}, command_line=[], now=NOW):
        pass
    assert caught.value.exit_code == 2
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("second", [(), ("policy_server.workers=1", "learner.ranks=2", "actor.count=2")])
def test_two_runs_that_begin_at_the_same_moment_share_no_port(monkeypatch, second):
    """Their searches for free ports begin at the same one, before any service listens."""
    monkeypatch.setattr("secrets.randbelow", lambda _: 7)
    with planning(run_dir=Path("one")) as one, planning(*second, run_dir=Path("two")) as two:
        ports = [port for plan in (one, two) for port in all_ports(plan)]
    assert len(ports) == len(set(ports))


def test_ports_that_the_user_chose_for_metrics_are_kept_from_the_search_for_others(monkeypatch, first_port):
    monkeypatch.setattr("secrets.randbelow", lambda _: 0)
    found = all_ports(planned(f"metrics.port={first_port}", "policy_server.workers=1", "learner.ranks=2", "actor.count=2"))
    assert len(found) == len(set(found))


def all_ports(plan):
    """Every port of a run: of the learner, for its workers and its ranks, of policy servers, and of metrics."""
    learners = [parse_endpoint(bind).port for bind in binds(plan.settings)]
    servers = [server.port for server in plan.policy_servers.values()]
    return [*learners, *servers, *([plan.master_port] if plan.master_port else []), *plan.metrics_ports.values()]


def test_where_the_number_of_actors_is_sought_there_is_an_address_for_each_that_may_be_tried(monkeypatch):
    """One to begin with, two for each core at most."""
    monkeypatch.setattr("services.cli.train.plan.cores", lambda: 3)
    plan = planned(auto_actors=True)
    assert set(plan.metrics_ports) == {"learner", "evaluator", *(f"actor-{number}" for number in range(6))}
    assert plan.supervisor().actors == 1
    search = plan.search()
    assert (search.max_actors, search.actors) == (6, 1)
    assert planned(run_dir=Path("third")).search() is None


@pytest.mark.parametrize(
    ("preset", "setting", "most"),
    [
        ("cartpole", "learner.max_actors=5", 5),
        ("pendulum-td3", "learner.credits=2", 10),  # eleven would be too many for its max_policy_lag
        ("pendulum-td3", "checkpoint.replay=true", 10),
        ("cartpole-dqn", "checkpoint.replay=false", 16),
        ("cartpole-dqn", "checkpoint.replay=true", 3),  # four, with 8 environments each, would need smaller blocks
        ("tmaze-dqn", "algorithm.replay_capacity=40_000", 3),  # ten rollouts of 64 of each of 16 environments
    ],
)
def test_a_run_can_be_resumed_with_each_number_that_is_tried(monkeypatch, preset, setting, most):
    monkeypatch.setattr("services.cli.train.plan.cores", lambda: 8)
    assert max_actors(load_settings(preset=preset, overrides=[setting, "actor.count=1"], environ={}).settings) == most
    load_settings(preset=preset, overrides=[setting, f"actor.count={most}"], environ={})


def test_a_replay_memory_that_is_laid_out_for_more_actors_is_no_start_of_a_search():
    """The learner refused the checkpoint, by a number that nobody had given."""
    settings = "actor.count=4", "checkpoint.replay=true"
    planned(*settings, preset="cartpole-dqn", run_dir=Path("r"))
    planned(preset=None, run_dir=Path("r"), resume=True, auto_actors=True)  # there is no checkpoint yet
    planned("actor.count=4", preset=None, run_dir=Path("r"), resume=True)
    Path("r/checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"replay memory in the checkpoint that is laid out for 4, wanted --actors 4"):
        planned(preset=None, run_dir=Path("r"), resume=True, auto_actors=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_killed_while_it_searches_is_resumed_with_an_actor_for_each_rank(ranks):
    """Without any, or with fewer, it would wait for experience that never comes."""
    plan = planned(f"learner.ranks={ranks}", run_dir=Path("r"), auto_actors=True)
    assert plan.supervisor().actors == plan.search().actors == ranks
    assert planned(preset=None, run_dir=Path("r"), resume=True).supervisor().actors == ranks


def test_the_number_that_was_found_is_what_a_resumed_run_has():
    """The search is not made again, unless it is asked for."""
    plan = planned(run_dir=Path("r"), auto_actors=True)
    assert "count: 1  # chosen for this run" in plan.directory.config.read_text()
    plan.write_config(3)
    assert "count: 3  # chosen for this run" in plan.directory.config.read_text()
    again = planned(preset=None, run_dir=Path("r"), resume=True)
    assert again.supervisor().actors == again.settings.actor.count == 3


@pytest.fixture
def uploaded(tmp_path):
    """The store that holds the copy of a run, runs/mine, whose directory is lost."""
    store = f"file://{tmp_path}/bucket"
    first = planned(f"run.store={store}", "rollout.length=64", run_dir=Path("runs/mine"))
    CheckpointStore(first.directory.checkpoints, keep=1).save(
        Checkpoint(run_id=first.settings.run.id, version=3, env_steps=300, architecture="a", counters={}, state={})
    )
    RunStore(f"{store}/mine").upload(first.directory, keep=1)
    shutil.rmtree(first.directory.path)
    return store, first.settings


def test_a_lost_run_is_downloaded_by_the_address_of_its_copy_or_by_its_store(uploaded):
    """On a new machine there is nothing but the bucket."""
    store, settings = uploaded
    by_address = planned(run_dir=Path("runs/mine"), store_copy=f"{store}/mine", preset=None, resume=True)
    assert (by_address.settings.run.id, by_address.settings.rollout.length) == (settings.run.id, 64)
    assert by_address.settings.run.store == store
    assert read(by_address.directory.checkpoints / "checkpoint-000000000003").env_steps == 300
    shutil.rmtree("runs")
    by_store = planned(f"run.store={store}", run_dir=Path("runs/mine"), preset=None, resume=True)
    assert by_store.settings.run.id == settings.run.id


def test_a_folder_with_another_run_than_the_copy_is_not_resumed_by_its_address(uploaded):
    """Runs of series have short names, under which another run may lie here."""
    store, settings = uploaded
    planned("run.seed=7", run_dir=Path("runs/mine"))
    with pytest.raises(ConfigError, match=f"run.store holds another run: found {settings.run.id}"):
        planned(run_dir=Path("runs/mine"), store_copy=f"{store}/mine", preset=None, resume=True)
    with pytest.raises(ConfigError, match=r"run\.store holds another run"):
        planned(f"run.store={store}", run_dir=Path("runs/mine"), preset=None, resume=True)


def test_a_run_by_the_configuration_of_another_has_an_id_of_its_own():
    """Trackers and comparisons know a run by it; an id that somebody wrote into a file of theirs is taken."""
    first = planned(run_dir=Path("first"))
    second = planned(preset="first/config.yaml", run_dir=Path("second"))
    assert second.settings.run.id not in {"", first.settings.run.id}
    Path("config.yaml").write_text("run: {id: mine}\n")
    assert planned(preset="config.yaml", run_dir=Path("third")).settings.run.id == "mine"


def test_a_new_run_in_a_store_needs_a_local_directory_and_a_name_of_its_own(uploaded):
    store, _ = uploaded
    with pytest.raises(ConfigError, match=re.escape(f"run.store={store}")):
        planned(run_dir=Path("runs/mine"), store_copy=f"{store}/mine")
    with pytest.raises(ConfigError, match="holds a run of this name"):
        planned(f"run.store={store}", run_dir=Path("runs/mine"))
    with pytest.raises(ConfigError, match="no run to resume"):
        planned(f"run.store={store}", run_dir=Path("runs/other"), preset=None, resume=True)
    assert not Path("runs/mine").exists()


def test_a_rank_that_would_have_no_actor_is_refused():
    with pytest.raises(ConfigError, match=r"actor\.count: found 1, wanted at least 2"):
        planned("learner.ranks=2", "actor.count=1", run_dir=Path("r"))
    assert not Path("r").exists()
    planned("learner.ranks=2", "actor.count=0", run_dir=Path("elsewhere"))


def test_ranks_of_the_learner_have_ports_in_a_row_and_the_variables_of_torchrun():
    plan = planned("learner.ranks=2", "actor.count=2", run_dir=Path("r"))
    bind = parse_endpoint(plan.settings.learner.bind)
    assert plan.settings.actor.learner == f"tcp://127.0.0.1:{bind.port},tcp://127.0.0.1:{bind.port + 1}"
    assert plan.settings.evaluator.learner == f"tcp://127.0.0.1:{bind.port}"
    first = plan.metrics_ports["learner"]
    assert plan.metrics_ports["learner-1"] == first + 1
    assert plan.command(Start("learner-1", resume=True))[-1] == f"metrics.port={first}"  # the rank adds its number
    assert "--resume" in plan.command(Start("learner-1", resume=True))
    for rank in ("learner", "learner-1"):  # whose others may be restarting
        assert "learner.ranks_seconds=null" in plan.command(Start(rank))
    assert "--run-lock" not in plan.command(Start("learner-1"))
    variables = plan.environment("learner-1")
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("1", "1", "2")
    assert variables["MASTER_PORT"] == plan.environment("learner")["MASTER_PORT"] == str(plan.master_port)
    assert plan.environment("actor-0") == {}
