"""Real child processes under the supervisor: started, killed, restarted, stopped, orphaned. The services are fakes.

Each fake writes a line to a pipe that the test reads, so that the test waits for events and never for time.
"""

import errno
import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from common.observability.deployment import LEARNER
from common.runtime.lifecycle import Echo
from services.cli.train.failure import crash_line
from services.cli.train.instructions import Outcome, Start
from services.cli.train.processes import Processes, stop_signals, supervise
from services.cli.train.supervisor import Supervisor, Timeouts

pytestmark = pytest.mark.system

QUICK = Timeouts(min_restart_delay=0.0, exit=0.2, terminate=60.0, learner_stop=60.0)  # no fake is killed for being slow

# Says "<role> <pid> <arguments>" on the pipe, then lives until SIGTERM, which it answers with a word and exit code 0.
FAKE = """
import os, signal, sys
role, pipe, *rest = sys.argv[1:]
say = lambda *words: os.write(os.open(pipe, os.O_WRONLY), (" ".join(map(str, words)) + "\\n").encode())
def leave(*_):
    say(role, "leaves")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("a word for the log of", role, flush=True)
say(role, os.getpid(), *rest)
while True:
    signal.pause()
"""


class Scene:
    """A pipe of what the fakes say, and the commands that start them."""

    def __init__(self, folder):
        self.folder, self.pipe = folder, folder / "pipe"
        os.mkfifo(self.pipe)
        self.reader = os.open(self.pipe, os.O_RDWR)  # read-write, so that it has no end while no fake is open
        self.rest = b""

    def command(self, start):
        """Return the command line of a child."""
        return [sys.executable, "-c", FAKE, start.child, str(self.pipe), *(["--resume"] if start.resume else [])]

    def heard(self):
        """The next line that a fake said."""
        while b"\n" not in self.rest:
            assert select.select([self.reader], [], [], 90.0)[0], "no fake said anything"
            self.rest += os.read(self.reader, 4096)
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode().split()

    def processes(self, command=None):
        """The adapter under test."""
        return Processes(command=command or self.command, logs=self.folder / "logs", environment=os.environ)


@pytest.fixture
def scene(tmp_path):
    """One pipe and one folder per test."""
    scene = Scene(tmp_path)
    yield scene
    os.close(scene.reader)


def test_a_run_survives_the_death_of_actor_and_learner_and_ends_cleanly_on_ctrl_c(scene):
    """The life of a run: three start, an actor and the learner are killed and come back alone, Ctrl-C ends all of them."""
    core = Supervisor(actors=1, evaluator=True, timeouts=QUICK)
    processes = scene.processes()
    heard = []

    def story():
        try:
            first = {role: int(pid) for role, pid, *_ in (scene.heard() for _ in range(3))}
            os.kill(first["actor-0"], signal.SIGKILL)
            again = scene.heard()
            os.kill(first["learner"], signal.SIGKILL)
            heard.extend([sorted(first), again[0], scene.heard()[::2]])
        finally:
            os.kill(os.getpid(), signal.SIGINT)
        heard.append([scene.heard()[0] for _ in range(3)])

    inbox = queue.SimpleQueue()
    narrator = threading.Thread(target=story)
    with stop_signals(lambda: inbox.put(core.request_stop)):
        narrator.start()
        supervise(core, processes, requests=inbox, on_tick=lambda: None, on_report=lambda _: None)
        narrator.join()
    assert heard[:3] == [["actor-0", "evaluator", "learner"], "actor-0", ["learner", "--resume"]]
    assert heard[3][0] == "learner", "the learner ends first, the others after it has"
    assert sorted(heard[3]) == ["actor-0", "evaluator", "learner"]
    assert core.outcome is Outcome.STOPPED
    assert core.restarts == 2
    assert processes.log("actor-0").read_text() == "a word for the log of actor-0\n" * 2


def test_one_request_that_comes_twice_is_one(monkeypatch):
    """`timeout 1h rookery train pong` sends its SIGTERM to the command, and then to the process group that the command is in."""
    monkeypatch.setattr("services.cli.train.processes.Echo", partial(Echo, lambda: 0.0))
    inbox = queue.SimpleQueue()
    with stop_signals(lambda: inbox.put("stop")):
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert inbox.get(timeout=120.0) == "stop"
    assert inbox.empty()


def test_a_run_under_nohup_outlives_its_terminal():
    inbox, before = queue.SimpleQueue(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(lambda: inbox.put("stop")):
            os.kill(os.getpid(), signal.SIGHUP)
            assert inbox.empty()
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert inbox.get(timeout=120.0) == "stop"


def test_actors_come_and_go_while_the_run_goes_on(scene):
    """`--actors auto`: two more are tried, then one of them leaves, and nobody else is touched."""
    processes, inbox, heard = scene.processes(), queue.SimpleQueue(), []

    def story():
        try:
            scene.heard(), scene.heard()
            inbox.put(partial(core.set_actors, 3))
            heard.append(sorted(scene.heard()[0] for _ in range(2)))
            inbox.put(partial(core.set_actors, 2))
            heard.append(scene.heard())
        finally:
            inbox.put(core.request_stop)
        heard.append(sorted(scene.heard()[0] for _ in range(3)))

    core = Supervisor(actors=1, evaluator=False, timeouts=QUICK)
    narrator = threading.Thread(target=story)
    narrator.start()
    supervise(core, processes, requests=inbox, on_tick=lambda: None, on_report=lambda _: None)
    narrator.join()
    assert heard == [["actor-1", "actor-2"], ["actor-2", "leaves"], ["actor-0", "actor-1", "learner"]]
    assert (core.outcome, core.restarts) == (Outcome.STOPPED, 0)


def test_a_child_that_refuses_its_settings_is_quoted(scene):
    """The error of an actor about a missing environment reaches the user, not its log only."""

    def command(start):
        refusal = "import sys; print('unknown environment id: found Pogn'); sys.exit(2)"
        return [sys.executable, "-c", refusal] if start.child == "actor-0" else scene.command(start)

    core, processes, words = Supervisor(actors=1, evaluator=False, timeouts=QUICK), scene.processes(command), []
    supervise(
        core,
        processes,
        requests=queue.SimpleQueue(),
        on_tick=lambda: None,
        on_report=lambda failure: words.extend([failure.child, *processes.log_end(failure.child)]),
    )
    assert words == ["actor-0", "unknown environment id: found Pogn"]
    assert core.outcome is Outcome.REFUSED


def test_a_learner_deaf_to_sigterm_is_killed_with_all_that_it_started(scene):
    """A second Ctrl-C must bring the prompt back even if a child hangs, and leave no grandchild behind."""
    deaf = """
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        os.write(os.open(sys.argv[1], os.O_WRONLY), f"{child.pid}\\n".encode())
        child.wait()
    """
    processes = scene.processes(lambda _: [sys.executable, "-c", textwrap.dedent(deaf), str(scene.pipe)])
    inbox = queue.SimpleQueue()
    grandchildren = []

    def on_tick():
        if not grandchildren:
            grandchildren.append(psutil.Process(int(scene.heard()[0])))
            inbox.put(core.request_stop)
            inbox.put(core.request_stop)

    core = Supervisor(actors=0, evaluator=False)
    supervise(core, processes, requests=inbox, on_tick=on_tick, on_report=lambda _: None)
    assert core.outcome is Outcome.KILLED
    psutil.wait_procs(grandchildren, timeout=90)
    assert not grandchildren[0].is_running() or grandchildren[0].status() == psutil.STATUS_ZOMBIE


def test_a_child_that_crashes_leaves_nothing_that_it_started(scene):
    """ViZDoom runs each environment as a process, which lives on where its actor was killed."""
    engine = f"echo engine >{scene.pipe}; exec sleep 1000"
    program = f"import signal, subprocess; subprocess.Popen(['sh', '-c', {engine!r}]); signal.pause()"
    processes = scene.processes(lambda _: [sys.executable, "-c", program])
    processes.start(Start("actor-0"))
    assert scene.heard() == ["engine"]
    actor = psutil.Process(processes.pids()["actor-0"])
    engines = actor.children()
    actor.kill()
    processes._running["actor-0"].wait()
    assert processes.exited() == {"actor-0": -signal.SIGKILL}
    assert not psutil.wait_procs(engines, timeout=90)[1]


def test_children_do_not_outlive_a_supervisor_that_is_killed(scene):
    """A kill -9 of the supervisor, or a closed laptop lid's out-of-memory killer: no orphan keeps a core busy for days."""
    program = f"""
        import os, sys
        from pathlib import Path
        from services.cli.train.processes import Processes
        from services.cli.train.instructions import Start
        command = lambda start: [sys.executable, "-c", {FAKE!r}, start.child, {str(scene.pipe)!r}]
        processes = Processes(command=command, logs=Path({str(scene.folder / "logs")!r}), environment=os.environ)
        processes.start(Start("learner"))
        processes.start(Start("actor-0"))
        sys.stdin.read()
    """
    root = Path(__file__).parents[4]
    supervisor = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, cwd=root)
    children = [psutil.Process(int(scene.heard()[1])) for _ in range(2)]
    supervisor.kill()
    supervisor.communicate()
    gone, alive = psutil.wait_procs(children, timeout=90)
    assert len(gone) == 2, alive


def test_the_terminals_ctrl_c_does_not_reach_the_children(scene):
    """Ctrl-C signals the whole foreground group: a child inside it would die before the learner could drain it."""
    processes = scene.processes()
    processes.start(Start(LEARNER))
    pid = int(scene.heard()[1])
    assert os.getpgid(pid) == pid == processes.pids()[LEARNER]
    assert os.getpgid(pid) != os.getpgid(0)
    processes.kill_all()
    assert processes.exited() == {LEARNER: -signal.SIGKILL}


def test_the_log_of_a_child_is_bounded_whatever_it_writes(scene, monkeypatch):
    """Tracebacks and C libraries too: its stderr is the file itself. The newest lines are kept."""
    monkeypatch.setattr("services.cli.train.processes.LOG_BYTES", 1000)
    processes = scene.processes()
    log = processes.log("actor-0")
    processes._running["actor-0"] = None  # of a child, only its output matters here
    with log.open("ab", buffering=0) as output:
        for number in range(200):
            output.write(f"line {number}\n".encode())
            processes.rotate_logs()
            assert log.stat().st_size <= 1000
    assert sum(path.stat().st_size for path in log.parent.iterdir()) <= 2100
    assert sorted(path.name for path in log.parent.iterdir()) == ["actor-0.log", "actor-0.log.1"]
    assert processes.log_end("actor-0", lines=50) == [f"line {number}" for number in range(150, 200)]


def test_a_log_that_cannot_be_opened_costs_the_log_not_the_child(scene):
    """The folder of the logs could not be made: the disk is full."""
    (scene.folder / "logs").touch()
    core = Supervisor(actors=0, evaluator=False, timeouts=QUICK)
    processes, inbox = scene.processes(), queue.SimpleQueue()
    inbox.put(core.request_stop)
    supervise(core, processes, requests=inbox, on_tick=lambda: None, on_report=pytest.fail)
    assert core.outcome is Outcome.STOPPED


# A learner that saves its state at SIGTERM, and an actor that has crashed.
SAVES = """
import os, pathlib, signal, sys
def save(*_):
    pathlib.Path(sys.argv[1]).write_text("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
os.write(os.open(sys.argv[2], os.O_WRONLY), b"learner ready\\n")
while True:
    signal.pause()
"""
FAULTS = {
    "fork": ("subprocess.Popen", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
    "memory of a fork": ("subprocess.Popen", OSError(errno.ENOMEM, "Cannot allocate memory")),
    "interpreter": ("subprocess.Popen", FileNotFoundError(errno.ENOENT, "No such file or directory")),
    "permission": ("subprocess.Popen", PermissionError(errno.EACCES, "Permission denied")),
    "arguments too long": ("subprocess.Popen", OSError(errno.E2BIG, "Argument list too long")),
    "wrapper": ("services.cli.train.exit_with_parent.wrapper", RuntimeError("no wrapper")),
    "log": ("services.cli.train.processes.Processes._output", OSError(errno.EIO, "Input/output error")),
    "log file": ("pathlib.Path.open", OSError(errno.ESTALE, "Stale file handle")),
    "end of a log": ("services.cli.train.processes.Processes.log_end", OSError(errno.EIO, "Input/output error")),
    "rotation": ("services.cli.train.processes.Processes.rotate_logs", MemoryError()),
    "exit codes": ("services.cli.train.processes.Processes.exited", OSError(errno.ECHILD, "No child processes")),
    "restart": ("services.cli.train.supervisor.Supervisor.exited", KeyError("actor-0")),
    "clock of the supervisor": ("services.cli.train.supervisor.Supervisor.tick", ZeroDivisionError()),
    "broken pipe": ("on_tick", BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "closed terminal": ("on_tick", ValueError("I/O operation on closed file")),
    "status page": ("on_tick", UnicodeDecodeError("utf-8", b"x", 0, 1, "no status")),
    "port": ("on_tick", OSError(errno.EADDRINUSE, "Address already in use")),
    "view": ("on_tick", RecursionError()),
    "interrupt": ("on_tick", KeyboardInterrupt()),
    "exit": ("on_tick", SystemExit(1)),
    "report": ("on_report", OSError(errno.EIO, "Input/output error")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_learner_saves_whatever_fails_in_the_supervisor(scene, monkeypatch, fault):
    target, error = FAULTS[fault]
    saved = scene.folder / "saved"

    def command(start):
        actor, learner = ["-c", "raise SystemExit(1)"], ["-c", SAVES, str(saved), str(scene.pipe)]
        return [sys.executable, *(learner if start.child == LEARNER else actor)]

    core, processes, inbox = Supervisor(actors=1, evaluator=False, timeouts=QUICK), scene.processes(command), queue.SimpleQueue()
    ready, reports = [], []

    def fail(*_, **__):
        raise error

    def on_tick():
        if not ready:
            ready.append(scene.heard())
            if "." in target:
                monkeypatch.setattr(target, fail)
        if target == "on_tick":
            fail()
        if core.restarts >= 2:  # the fault has ended no run
            monkeypatch.undo()
            inbox.put(core.request_stop)

    def on_report(report):
        reports.append(report)
        if ready and target == "on_report":
            fail()
        processes.log_end(report.child)

    with suppress(type(error)):
        supervise(core, processes, requests=inbox, on_tick=on_tick, on_report=on_report)
    monkeypatch.undo()
    assert saved.read_text() == "saved"
    assert all(process.poll() is not None for process in processes._running.values())


# As a service: the first SIGTERM begins the save, which SIGUSR1 lets end, and a second SIGTERM ends the process at once.
SAVES_SLOWLY = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n" + SAVES.replace(
    'pathlib.Path(sys.argv[1]).write_text("saved")',
    """signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    os.write(os.open(sys.argv[2], os.O_WRONLY), b"learner saves\\n")
    signal.sigwait([signal.SIGUSR1])
    pathlib.Path(sys.argv[1]).write_text("saved")""",
)


def test_a_fault_while_the_learner_saves_does_not_cut_its_save_short(scene, monkeypatch):
    saved = scene.folder / "saved"
    processes = scene.processes(lambda _: [sys.executable, "-c", SAVES_SLOWLY, str(saved), str(scene.pipe)])
    core, inbox, heard = Supervisor(actors=0, evaluator=False, timeouts=QUICK), queue.SimpleQueue(), []

    def on_tick():
        heard.append(scene.heard())
        inbox.put(core.request_stop)
        if len(heard) > 1:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    wait = subprocess.Popen.wait

    def wait_for_its_save(process, timeout=None):
        process.send_signal(signal.SIGUSR1)  # all signals that end it early were sent before
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_its_save)
    with pytest.raises(BrokenPipeError):
        supervise(core, processes, requests=inbox, on_tick=on_tick, on_report=pytest.fail)
    assert heard == [["learner", "ready"], ["learner", "saves"]]
    assert saved.read_text() == "saved"


def test_a_fault_ends_workers_by_sigterm_after_the_learner(scene):
    core, processes, heard = Supervisor(actors=1, evaluator=False, timeouts=QUICK), scene.processes(), []

    def on_tick():
        heard.extend([scene.heard(), scene.heard()])
        raise RecursionError

    with pytest.raises(RecursionError):
        supervise(core, processes, requests=queue.SimpleQueue(), on_tick=on_tick, on_report=pytest.fail)
    assert [scene.heard(), scene.heard()] == [["learner", "leaves"], ["actor-0", "leaves"]]


def test_a_log_that_cannot_be_read_is_said_and_is_not_emptied(scene, monkeypatch):
    monkeypatch.setattr("services.cli.train.processes.LOG_BYTES", 3)
    processes = scene.processes()
    processes._running["actor-0"] = None
    log = processes.log("actor-0")
    log.write_text("a line of an actor\n")
    opened = Path.open

    def refused(path, mode="r", *rest):
        if mode == "rb":
            raise OSError(errno.ESTALE, "Stale file handle")
        return opened(path, mode, *rest)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "open", refused)
        assert processes.log_end("actor-0") == ["its log cannot be read: Stale file handle"]
        processes.rotate_logs()
    assert log.read_text() == "a line of an actor\n"


def test_a_child_that_cannot_be_started_is_restarted_and_named(scene, monkeypatch):
    core, processes, inbox = Supervisor(actors=1, evaluator=False, timeouts=QUICK), scene.processes(), queue.SimpleQueue()
    popen, lines = subprocess.Popen, []

    def out_of_processes(arguments, **options):
        if "actor-0" in arguments and not lines:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return popen(arguments, **options)

    def on_tick():
        if core.restarts == 1 and inbox.empty():
            inbox.put(core.request_stop)

    monkeypatch.setattr("subprocess.Popen", out_of_processes)
    on_report = lambda crash: lines.append(crash_line(crash, processes))  # noqa: E731
    supervise(core, processes, requests=inbox, on_tick=on_tick, on_report=on_report)
    assert "actor-0 crashed and is restarted: [Errno 11] Resource temporarily unavailable" in lines[0]


def test_last_words_are_the_end_of_a_long_log(scene):
    """A log of many megabytes is not read whole to show its end."""
    processes = scene.processes()
    assert processes.log_end("actor-7") == []
    processes.log("actor-7").write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert processes.log_end("actor-7", lines=2) == ["line 99998", "line 99999"]
