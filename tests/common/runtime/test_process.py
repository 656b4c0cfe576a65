"""From an error to an exit code."""

from __future__ import annotations

import resource
import subprocess
import sys
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest

from common.errors import ConfigError, InternalError, ResourceError
from common.observability.health import Health
from common.observability.logs import PlainFormatter
from common.runtime import process
from common.runtime.lifecycle import Shutdown

pytestmark = pytest.mark.service


def raises(error):
    """A main function that fails."""

    def main():
        raise error

    return main


def test_the_exit_code_of_main_is_the_exit_code():
    """A run that reached its target, and one that did not."""
    assert process.run(lambda: 0, program="rookery") == 0
    assert process.run(lambda: 3, program="rookery") == 3


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("no such preset", found="pomg", wanted="pong"), 2, "no such preset: found pomg, wanted pong"),
        (ResourceError("the disk\nis full"), 2, "the disk is full"),
        (InternalError("the ledger does not balance"), 1, "the ledger does not balance"),
    ],
)
def test_an_error_of_ours_is_one_line_and_its_code(capsys, error, code, said):
    """A mistyped preset, for example."""
    assert process.run(raises(error), program="rookery learner") == code
    assert capsys.readouterr().err == f"rookery learner: error: {said}\n"


def test_the_traceback_shows_with_debug(capsys):
    """Somebody wants to know where the setting was read."""
    assert process.run(raises(ConfigError("bad")), program="rookery", debug=True) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("rookery: error: bad\n")


def test_ctrl_c_before_the_signals_are_installed_is_quiet(capsys):
    """The user changed their mind while torch was loading."""
    assert process.run(raises(KeyboardInterrupt()), program="rookery") == 130
    assert capsys.readouterr().err == ""


def in_a_process(program):
    """Run a program of its own: logging and threads cannot be undone in this one."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)


def test_garbage_is_collected_again_after_the_imports():
    program = """if True:
        import gc
        from common.runtime import lifecycle, process
        lifecycle.begin_process()
        assert not gc.isenabled()
        raise SystemExit(process.run(lambda: int(gc.isenabled()), program="p"))
    """
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1


def test_an_unexpected_exception_is_code_1_with_its_traceback_though_nothing_was_configured():
    """A bug before the logs were set up must not vanish."""
    ended = in_a_process("from common.runtime import process\nraise SystemExit(process.run(lambda: 1 // 0, program='rookery'))")
    assert ended.returncode == 1
    assert "rookery CRITICAL unexpected_error" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr
    assert ended.stderr.count("Traceback") == 1


def test_a_lingering_service_is_alive_and_ready_until_its_end_is_requested():
    """An orchestrator that restarts ended processes must see no reason to, for days."""
    now = [0.0]
    shutdown, health, answers = Shutdown(), Health(clock=lambda: now[0]), []

    def check():
        now[0] += 0.0015  # more than is waited for, and less than twice as much
        answers.append((health.liveness().ok, health.readiness().ok))
        if len(answers) == 3:
            shutdown.request("SIGTERM")

    process.linger(shutdown, health, seconds=0.001, check=check)
    assert answers == [(True, True)] * 3


def test_a_lingering_service_does_not_hide_that_a_part_of_it_has_died():
    """Without the intake thread no worker gets the end of the run."""
    with pytest.raises(InternalError, match="died"):
        process.linger(Shutdown(), Health(), seconds=0.001, check=raises(InternalError("the intake thread died")))


def test_a_service_that_was_stopped_does_not_linger():
    """SIGTERM ended the run: there is nothing to stay for."""
    shutdown, health = Shutdown(), Health()
    shutdown.request("SIGTERM")
    process.linger(shutdown, health, check=raises(InternalError("it lingered")))
    assert not health.readiness().ok


def test_the_command_line_does_not_load_torch_with_this_module():
    """`rookery --help` answers at once."""
    ended = in_a_process("import sys, common.runtime.process\nraise SystemExit('torch' in sys.modules)")
    assert ended.returncode == 0


def test_torch_computes_on_as_many_threads_as_set_and_may_be_set_twice():
    """One thread per process is what makes two processes on two cores fast."""
    ended = in_a_process(
        "import torch\nfrom common.runtime.process import set_torch_threads\n"
        "set_torch_threads(2)\nset_torch_threads(1)\nprint(torch.get_num_threads(), torch.get_num_interop_threads())"
    )
    assert (ended.returncode, ended.stdout) == (0, "1 1\n")


def test_environments_that_fail_when_they_are_closed_hide_no_error(capsys):
    """Their simulator has crashed, so that neither a step nor the end of it works."""

    def main():
        with ExitStack() as resources:
            resources.callback(process.close_environments, SimpleNamespace(close=raises(OSError("no simulator to end"))))
            raise ConfigError("the simulator has crashed")

    assert process.run(main, program="rookery actor") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "rookery actor: error: the simulator has crashed"


def test_environments_that_hang_when_they_are_closed_end_the_process_with_the_error_before_that(monkeypatch, caplog):
    limits = []

    def time_limit(limit, *, on_slow, on_limit):
        limits.append((limit, on_limit))
        return nullcontext()

    monkeypatch.setattr(process, "time_limit", time_limit)
    resources = ExitStack()
    resources.callback(process.close_environments, SimpleNamespace(close=lambda: None))
    with pytest.raises(ValueError, match="crashed"), resources:
        raise ValueError("the simulator has crashed")
    ((limit, on_limit),) = limits
    on_limit(limit)
    line = PlainFormatter("actor", tracebacks=False).format(caplog.records[-1])
    assert "not closed within 4 s, after ValueError('the simulator has crashed')" in line


def test_a_process_may_open_as_many_files_as_its_hard_limit_allows():
    """One for each connection; a shell gives 1,024."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        process.allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_ends_with_its_code_and_its_last_words_and_without_a_teardown():
    """`atexit` functions that a user's package registered are called; the interpreter does not tear its modules down."""
    ended = in_a_process(
        "import atexit, logging\nfrom common.runtime import process\n"
        "class Module:\n    def __del__(self):\n        print('taken apart')\n"
        "kept = Module()\natexit.register(print, 'simulator ended')\nprint('goodbye')\nprocess.end_process(3)"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "goodbye\nsimulator ended\n", "")


def test_a_process_ends_though_nobody_reads_its_last_words():
    """`rookery learner | head`: the rest of the buffer has no reader."""
    ended = in_a_process(
        "import os\nfrom common.runtime import process\nprint('goodbye')\nos.close(1)\nos.close(2)\nprocess.end_process(0)"
    )
    assert ended.returncode == 0
