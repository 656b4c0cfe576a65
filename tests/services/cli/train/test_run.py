"""A whole `rookery train` around a learner that is a fake: what the user is shown, and what is left behind."""

import io
import json
import os
import re
import shutil
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config.layers import parse_yaml
from common.config.load import load_settings
from common.config.schema import Settings
from common.config.sections import LearnerSettings
from common.envs.spec import EnvSettings
from common.errors import ConfigError
from common.models.spec import ModelSettings
from common.runtime.checkpoints import by_version
from common.runtime.run_directory import find
from services.cli.train import run, view
from services.cli.train.plan import Plan, Request, make_plan
from services.cli.train.processes import Requests
from services.cli.train.run import join_line, resume_command, train
from services.cli.train.status import RunStatus
from services.cli.train.view import LineView, ViewFrame, make_view

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("first_port")]

# Serves /status once, then writes the files of a learner, and exits with the code in its arguments.
LEARNER = """
import json, pathlib, shutil, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
run_dir, port, solved, code, words, left = pathlib.Path(sys.argv[1]), int(sys.argv[2]), *json.loads(sys.argv[3])
for name in left:
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(left[name])
if words:
    print(words, flush=True)
    sys.exit(code)
summary = {"solved": solved, "env_steps": 4000, "wall_seconds": 20.0, "frames_per_second": 200.0, "mean100": 480.0}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        status = {"phase": "training", "env_steps": 4000, "mean100": 480.0, "version": 7, "policy_lag": None}
        metric = 'rookery_learner_phase_seconds_total{phase="train"} 9.0\\n'
        self.wfile.write(json.dumps(status).encode() if self.path == "/status" else metric.encode())
    def log_message(self, *_):
        pass
server = HTTPServer(("127.0.0.1", port), Handler)
shutil.copy(run_dir / "addresses.json", run_dir / "seen.json")
server.handle_request()
server.handle_request()
curve = "wall_seconds,env_steps,episode_return_mean,evaluation_return\\n1,100,20,\\n20,4000,480,\\n"
(run_dir / "learning_curve.csv").write_text(curve)
(run_dir / "summary.json").write_text(json.dumps(summary))
sys.exit(code)
"""


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Run `train` with that learner alone; gives the exit code, what was shown, and the run directory."""

    def run(*overrides, solved=True, code=0, words="", left=None, debug=False, resume=False, auto=False):
        how = json.dumps([solved, code, words, left or {}])

        def command(plan, start):
            if start.child.startswith("actor"):
                return ["sleep", "600"]
            port = plan.metrics_ports["learner"]
            return [sys.executable, "-c", LEARNER, str(plan.directory.path), str(port), how]

        monkeypatch.setattr(Plan, "command", command)
        alone = ("actor.count=0", "evaluator.enabled=false")
        overrides = (*alone, *overrides)
        request = Request(preset="cartpole", overrides=overrides, run_dir=tmp_path / "run", resume=resume, auto_actors=auto)
        shown, errors = io.StringIO(), io.StringIO()
        environ = {**os.environ, "ROOKERY_RUN__SEED": "9"}
        code = train(request, environ=environ, command_line=["rookery"], stdout=shown, stderr=errors, debug=debug)
        return code, shown.getvalue(), errors.getvalue(), tmp_path / "run"

    return run


def test_a_run_that_solves_says_so_and_leaves_its_curve(trained):
    """The five-minute run of the README, in small."""
    code, shown, errors, run_dir = trained()
    assert (code, errors) == (0, "")
    assert "cartpole, seed 9" in shown
    assert re.search(r"^0:00:\d\d (starting$|training )", shown, re.MULTILINE)  # the first status, however late it comes
    assert "solved: the target was reached" in shown
    assert "4,000 env steps in 0:00:20" in shown
    assert not re.search(r"^\d:\d\d:\d\d (ended|stopping)", shown, re.MULTILINE), "a status that is older than the result"
    assert {path.name for path in run_dir.iterdir()} >= {
        "config.yaml",
        "command.txt",
        "learning_curve.png",
        "summary.json",
        "logs",
    }


def test_while_a_run_goes_on_its_folder_says_where_its_services_answer(trained):
    """`rookery top` finds them there, whatever ports were free; and when the run is over nobody is looked for."""
    *_, run_dir = trained()
    seen = json.loads((run_dir / "seen.json").read_text())
    assert list(seen) == ["learner"]
    assert seen["learner"].startswith("http://127.0.0.1:")
    assert not (run_dir / "addresses.json").exists()


def test_a_run_that_ends_before_a_number_of_actors_was_measured_is_resumed_with_one(trained):
    """Without any, a resumed run would wait for actors that nobody starts."""
    code, shown, _, run_dir = trained(auto=True)
    assert (code, "--actors auto" in shown) == (0, False)
    assert parse_yaml((run_dir / "config.yaml").read_text(), source="config.yaml")["actor"]["count"] == 1


def test_a_run_that_is_killed_while_it_searches_goes_on_with_the_actors_that_it_had(tmp_path):
    """Config.yaml has their number at each moment, also where the run directory was deleted."""
    request = Request(preset="cartpole", run_dir=tmp_path / "run", auto_actors=True)
    with make_plan(request, environ={}, command_line=[], now=datetime.now(UTC)) as plan:
        watch, seconds, requests = SimpleNamespace(latest=RunStatus()), iter(range(1000)), Requests()
        display = run._Display(
            plan=plan,
            supervisor=plan.supervisor(),
            watch=watch,
            view=LineView(io.StringIO(), style="plain"),
            requests=requests,
            search=plan.search(),
            newest_line=lambda _: "",
            clock=lambda: next(seconds),
        )

        def actors():
            return load_settings(preset=str(plan.directory.config), environ={}).settings.actor.count

        assert actors() == 1
        while display.search.actors == 1:
            watch.latest = RunStatus(phase="training", env_steps=watch.latest.env_steps + 100, workers={"actor": 1})
            display.tick()
        assert actors() == 2
        while not requests.empty():
            requests.get()(0.0)
        shutil.rmtree(plan.directory.path)
        display.tick()
        assert actors() == 2


def test_a_run_without_actors_shows_how_they_join_it(trained):
    """It waits for them, and no other place shows the port that was free."""
    _, shown, _, _ = trained()
    (line,) = [line for line in shown.splitlines() if "rookery actor" in line]
    assert re.match(r"no actor is started here; `rookery actor --learner tcp://127\.0\.0\.1:\d+` on this machine joins", line)


@pytest.mark.parametrize(
    ("learner", "command"),
    [
        ({"bind": "tcp://0.0.0.0:5700", "keys": "keys/learner"}, "--learner tcp://HOST:5700 --keys DIR` joins"),
        ({"bind": "tcp://10.0.0.7:5700", "insecure": True}, "--learner tcp://10.0.0.7:5700 --insecure` joins"),
        ({"bind": "tcp://127.0.0.1:5700", "keys": "k"}, "--learner tcp://127.0.0.1:5700 --keys DIR` on this machine joins"),
        ({"bind": "tcp://127.0.0.1:5700", "ranks": 2}, "--learner tcp://127.0.0.1:5700,tcp://127.0.0.1:5701` on this machine"),
    ],
)
def test_the_command_of_an_actor_that_joins_has_all_addresses_and_what_the_learner_requires(learner, command):
    assert command in join_line(Settings(learner=LearnerSettings(**learner)))


def test_the_command_of_an_actor_that_joins_allows_the_code_that_the_settings_name():
    settings = Settings(env=EnvSettings(id="farm:Field-v0"), model=ModelSettings(entry_point="nets.small:build"))
    assert re.search(r"--learner \S+ --allow-code nets\.small --allow-code farm` on this machine joins", join_line(settings))


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("elsewhere:make", " --allow-code elsewhere"),
        ("here:make", ""),
        ("common.envs.probes:counting", ""),
        ("common.envs.probes:Probe", " --allow-code common.envs.probes"),
    ],
)
def test_the_command_that_resumes_a_run_allows_its_code_where_that_is_elsewhere(tmp_path, monkeypatch, code, options):
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").touch()
        monkeypatch.syspath_prepend(tmp_path / name)
    monkeypatch.chdir(tmp_path / "here")
    settings = Settings(env=EnvSettings(id="", entry_point=code))
    assert resume_command(settings, Path("R")) == f"rookery train --resume --run-dir R{options}"


def test_a_run_that_lost_results_says_so_at_its_end(trained):
    """The tracker was away; else only the log of the learner has it."""
    line = 'learner WARNING results_incomplete detail="wandb did not get 7 points"'
    code, shown, _, run_dir = trained(left={"logs/learner.log": f"{line}\n"})
    assert code == 0
    assert f"  lost           wandb did not get 7 points ({run_dir / 'logs' / 'learner.log'})\n" in shown


def test_a_learner_that_ends_too_early_is_a_failure(trained):
    """The learner was stopped by hand: a script must not take the run for a success."""
    code, shown, _, _ = trained(solved=False)
    assert code == 1
    assert "before its target and its budget" in shown


def test_a_setting_refused_by_a_service_is_one_line_and_leaves_nothing(trained):
    """An unknown environment is an error of the service that builds it: the user sees its message, and the folder is removed."""
    message = "rookery learner: error: unknown environment id: found Pogn-v5, wanted Pong-v5"
    code, shown, errors, run_dir = trained(code=2, words=f"12:00:00 learner starts\n{message}")
    assert code == 2
    assert errors == "rookery train: error: unknown environment id: found Pogn-v5, wanted Pong-v5 (from learner)\n"
    assert not run_dir.exists()
    assert "solved" not in shown


MANIFEST = "checkpoints/checkpoint-000000000000/manifest.json"


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ({MANIFEST: "{}", "summary.json": '{"learner_updates": 0}'}, False),
        ({MANIFEST: "{}", "summary.json": '{"learner_updates": 1}'}, True),
        ({MANIFEST: "{}"}, True),
        ({MANIFEST: "{}", "summary.json": "cut sho"}, True),
        ({MANIFEST: "{}", "summary.json": "[]"}, True),
    ],
)
def test_a_run_that_is_refused_keeps_its_folder_only_where_something_was_learned(trained, left, kept):
    """An actor finds a missing ROM: the learner saves what it has, which is nothing. After an hour it is an hour's work."""
    code, _, errors, run_dir = trained(code=2, words="rookery learner: error: no", left=left)
    assert (code, run_dir.exists()) == (2, kept)
    assert errors == "rookery train: error: no (from learner)\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [("log.level=info", True), ("target.env_steps=8000", False), ("env.kwargs.sutton_barto_reward=true", False)],
)
def test_a_resumed_run_that_had_ended_says_how_it_goes_on(trained, change, said):
    """Its processes started, and ended again, without a word. Returns of another task begin anew, and may be trained for."""
    ended = "target.mean100=null", "target.env_steps=4000"
    trained(*ended, solved=False)
    _, shown, _, _ = trained(*ended, change, solved=False, resume=True)
    assert ("the run had ended: the budget of env steps is spent; to train on, raise its target or budget" in shown) == said


def test_a_resume_with_settings_that_the_learner_refuses_leaves_those_of_the_run(trained):
    """Another network does not fit the checkpoint: the run resumes, and its policy loads, as before."""
    *_, run_dir = trained()
    before = (run_dir / "config.yaml").read_bytes()
    code, _, errors, _ = trained("model.hidden=[32]", resume=True, code=2, words="rookery learner: error: another architecture")
    assert (code, errors) == (2, "rookery train: error: another architecture (from learner)\n")
    assert (run_dir / "config.yaml").read_bytes() == before


def test_debug_shows_the_whole_end_of_the_log(trained):
    """The traceback of a service is in its log; with --debug the user need not look for it."""
    _, _, errors, _ = trained(code=2, words="Traceback ...\nrookery learner: error: no", debug=True)
    assert "Traceback ..." in errors


# Serves the pages of a learner until SIGTERM, whose status has the ledger and whose metrics have the messages in its arguments;
# that of an actor whose log is empty yet has refused nothing.
WAITING = """
import json, pathlib, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
ledger, messages = json.loads(sys.argv[2])
log = pathlib.Path(sys.argv[3])
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        status = json.dumps({"phase": "training", "ledger": ledger})
        refused = messages if log.exists() and log.read_text() else 0
        metrics = f'rookery_learner_messages_dropped_total{{reason="non_finite"}} {refused}\\n'
        metrics += f'rookery_learner_phase_seconds_total{{phase="wait"}} {time.monotonic()}\\n'
        self.wfile.write((status if self.path == "/status" else metrics).encode())
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CRASHES = """
import sys
print('12:00:00.000 actor CRITICAL unexpected_error error="ValueError: no such level"', "Traceback", sep="\\n")
sys.exit(1)
"""
HANGS = """
import os, pathlib, sys, time
print("12:00:00.000 actor WARNING environment_slow", flush=True)
while not pathlib.Path(os.environ["LOOKED_AT"]).exists():
    time.sleep(0.01)
sys.exit(1)
"""
REFUSED = """
import signal
print('12:00:00.000 actor WARNING message_rejected seq=0 detail="array reward at [3, 0]: found nan"', flush=True)
signal.pause()
"""


@pytest.fixture
def vain(tmp_path, monkeypatch):
    """Run `train` with a learner that accepts nothing and one actor; gives the exit code and what was shown."""

    def run(actor, *, refused=0):
        ledger = json.dumps([{"dropped": {"non_finite": 256 * refused}}, refused])

        def command(plan, start):
            plan.directory.checkpoints.mkdir(exist_ok=True)
            plan.directory.summary.write_text('{"learner_updates": 0}')
            words = [str(plan.metrics_ports["learner"]), ledger, str(plan.directory.logs / "actor-0.log")]
            return [sys.executable, "-c", *([WAITING, *words] if start.child == "learner" else [actor])]

        monkeypatch.setattr(Plan, "command", command)
        request = Request(preset="cartpole", overrides=("actor.count=1", "evaluator.enabled=false"), run_dir=tmp_path / "run")
        shown, errors = io.StringIO(), io.StringIO()
        code = train(request, environ=dict(os.environ), command_line=["rookery"], stdout=shown, stderr=errors)
        return code, shown.getvalue(), errors.getvalue()

    return run


def test_a_run_whose_actor_crashes_twice_ends_with_its_error_and_without_advice(vain):
    code, shown, errors = vain(CRASHES)
    assert code == 1
    assert shown.count("actor-0 crashed and is restarted: ValueError: no such level (") == 1
    assert "rookery actor" not in shown, "it has an actor"
    assert errors.startswith("rookery train: error: actor-0 cannot work: 2 crashes before any of its experience was ")
    assert "(exit code 1): ValueError: no such level; correct the environment (" in errors
    assert errors.count("\n") == 1
    assert "learner waits" not in shown
    assert "--resume" not in shown


def test_a_run_without_experience_shows_what_its_first_actor_logged_last(vain, monkeypatch, tmp_path):
    monkeypatch.setattr("services.cli.train.run.SILENCE", 0.0)
    monkeypatch.setenv("LOOKED_AT", str(tmp_path / "looked-at"))
    newest, line = run.newest_line, "actor-0 logged last: 12:00:00.000 actor WARNING environment_slow ("

    def newest_once_logged(child, processes):
        while line not in (found := newest(child, processes)):  # the actor may not have started yet
            time.sleep(0.01)
        (tmp_path / "looked-at").touch()
        return found

    monkeypatch.setattr(run, "newest_line", newest_once_logged)
    _, shown, _ = vain(HANGS)
    assert f"of training; {line}" in shown


def test_a_run_whose_experience_is_all_refused_ends_with_the_reason(vain):
    code, shown, errors = vain(REFUSED, refused=3)
    assert code == 1
    assert "all its experience is refused (3 messages): array reward at [3, 0]: found nan; correct the environment" in errors
    assert "learner waits" not in shown


def test_a_reader_that_leaves_ends_nothing(capsys):
    """`rookery train ... | head`: said once, on stderr; and what the stream still holds hurts no later flush."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        view = LineView(stream, style="plain")
        for _ in range(3):
            view.print_message("a line")
    assert capsys.readouterr().err == "rookery train: warning: the display ends: Broken pipe; the run goes on\n"


@pytest.mark.parametrize("closed_before", range(5))
def test_a_terminal_that_closes_ends_nothing(capsys, monkeypatch, closed_before):
    """A window is closed on a run that ignores SIGHUP: the live panel fails as lines do, whatever is shown next."""
    monkeypatch.setenv("TERM", "xterm")
    terminal, end = os.openpty()
    with os.fdopen(end, "w") as stream:
        live, frame = make_view(stream, "auto"), ViewFrame(title="pong", run_dir="runs/pong", status=RunStatus())
        steps = [
            live.__enter__,
            lambda: live.show(frame),
            lambda: live.print_message("a line"),
            lambda: live.__exit__(None, None, None),
            lambda: live.print_result(["solved"], {}),
        ]
        for number, step in enumerate(steps):
            if number == closed_before:
                os.close(terminal)
            step()
    assert capsys.readouterr().err == "rookery train: warning: the display ends: Input/output error; the run goes on\n"


def test_nothing_starts_in_a_folder_that_is_in_use(trained, tmp_path):
    """A second run into the first one's folder would mix their checkpoints."""
    trained()
    with pytest.raises(ConfigError, match="in use"):
        trained()
    assert Path(tmp_path / "run" / "summary.json").exists()


def test_a_run_whose_directory_is_deleted_says_so_and_can_be_resumed_from_there(tmp_path, monkeypatch):
    """The learner itself, and no fake. A second display finds the folder gone; the third waits for the next checkpoint."""
    run_dir, shown = tmp_path / "run", io.StringIO()
    stages = iter(
        [
            # At once, while the learner writes there: `rmtree` fails where a file comes or goes meanwhile.
            lambda: by_version(run_dir / "checkpoints") and run_dir.rename(tmp_path / "deleted"),
            lambda: by_version(run_dir / "checkpoints"),
            lambda: os.kill(os.getpid(), signal.SIGINT) or True,
        ]
    )
    stage = [next(stages)]
    tick = run._Display.tick

    def and_delete(display):
        tick(display)
        if stage[0]():
            stage[0] = next(stages, lambda: False)

    monkeypatch.setattr(run._Display, "tick", and_delete)
    monkeypatch.setattr(LineView, "period", 0.1)
    few = ("actor.count=1", "evaluator.enabled=false", "checkpoint.every_seconds=1")
    endless = ("target.mean100=null", "target.env_steps=1_000_000_000")
    request = Request(preset="cartpole", overrides=few + endless, run_dir=run_dir)
    assert train(request, environ=dict(os.environ), command_line=["rookery"], stdout=shown, stderr=io.StringIO()) == 0
    assert shown.getvalue().count(f"the run directory {run_dir} was deleted: what it held is lost") == 1
    assert find(run_dir).begun
    assert "go on          rookery train --resume" in shown.getvalue()


def test_a_learner_saves_where_the_display_of_its_run_fails(tmp_path, monkeypatch):
    """The learner itself, and no fake: what it has learned by then is in its checkpoints."""
    facts = view.plain_line

    def fail_once_it_learns(frame):
        if frame.status.learner_updates:
            raise RecursionError
        return facts(frame)

    monkeypatch.setattr(view, "plain_line", fail_once_it_learns)
    monkeypatch.setattr("services.cli.train.view.LineView.period", 0.0)
    alone = ("actor.count=1", "evaluator.enabled=false", "checkpoint.every_seconds=3600")
    endless = ("target.mean100=null", "target.env_steps=1_000_000_000")
    request = Request(preset="cartpole", overrides=alone + endless, run_dir=tmp_path / "run")
    errors = io.StringIO()
    with pytest.raises(RecursionError):
        train(request, environ=dict(os.environ), command_line=["rookery"], stdout=io.StringIO(), stderr=errors)
    assert f"continue with `rookery train --resume --run-dir {tmp_path / 'run'}`" in errors.getvalue()
    newest, *_ = by_version(tmp_path / "run" / "checkpoints")
    assert newest > 0
    assert newest == json.loads((tmp_path / "run" / "summary.json").read_text())["learner_updates"]
