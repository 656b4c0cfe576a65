"""`rookery completion`: what bash offers with the script."""

import shutil
import subprocess

import pytest

from services.cli.app import main

pytest.importorskip("shtab")
pytestmark = pytest.mark.service


@pytest.fixture
def offered(tmp_path, capsys):
    """Return the words that bash offers for the last of `words`."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "rookery.bash").write_text(capsys.readouterr().out)

    def complete(*words):
        line = ["rookery", *words]
        listed = " ".join(f"'{word}'" for word in line)
        program = f"""source {tmp_path / "rookery.bash"}
COMP_WORDS=({listed}); COMP_CWORD={len(words)}; COMP_LINE='{" ".join(line)}'; COMP_POINT={len(" ".join(line))}
$(complete -p rookery | sed 's/.*-F \\([^ ]*\\).*/\\1/') rookery '{words[-1]}' '{line[-2]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        return done.stdout.split()

    return complete


def test_bash_completes_commands_options_presets_and_settings(offered):
    assert {"train", "compare", "report"} <= set(offered(""))
    assert offered("tra") == ["train"]
    assert offered("train", "--see") == ["--seed", "--seeds"]
    assert "cartpole-dqn" in offered("train", "cartpole")
    assert offered("train", "pong", "algorithm.replay_c") == ["algorithm.replay_capacity="]
    assert "--describe" in offered("config", "show", "--d")


def test_an_unknown_shell_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "bash" in err
