"""`rookery export`: the file that it writes, its comparison with the policy, and one line for bad input."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("onnxscript") is None:  # torch imports it for an export, and it takes half a second
    pytest.skip("no onnxscript", allow_module_level=True)
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from common.policies.export import Comparison  # noqa: E402 - the packages come first
from services.cli.policy import export  # noqa: E402
from tests.services.cli.conftest import called  # noqa: E402

pytestmark = pytest.mark.service


def without(monkeypatch, package):
    """Let one package be not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))


def test_the_file_is_written_and_checked(make_run, tmp_path, capsys):
    run, _ = make_run("model.hidden=[8]")
    file = tmp_path / "policy.onnx"
    file.write_text("an older one")
    assert called("export", run.path, file, "--check", 200) == 0
    out, err = capsys.readouterr()
    facts = {line[:18].strip(): line[18:] for line in out.splitlines()}
    assert facts == {
        "file": f"{file}, {file.stat().st_size:,} bytes",
        "run": "tiny, ppo, version 7, 7,000 env steps",
        "inputs": "observation float32 [batch, 4]",
        "outputs": "action int64 [batch], logits float32 [batch, 2]",
        "check": "200 of 200 greedy actions equal by onnxruntime",
    }
    assert err == ""
    model = onnx.load(file)
    assert {entry.key: entry.value for entry in model.metadata_props}["rookery.run_id"] == "tiny"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["policy.onnx", "run"]


def test_a_model_that_acts_differently_is_not_written(make_run, tmp_path, capsys, monkeypatch):
    run, _ = make_run()
    monkeypatch.setattr(export, "to_onnx", lambda _: b"a model")
    monkeypatch.setattr(export, "compare", lambda *_, observations: Comparison(observations=observations, equal=996, ties=1))
    assert called("export", run.path, tmp_path / "policy.onnx") == 1
    assert "takes other greedy actions: found 3 of 1,000 observations, wanted none" in capsys.readouterr().err
    assert not (tmp_path / "policy.onnx").exists()


@pytest.mark.parametrize(("package", "options"), [("onnxscript", []), ("onnxruntime", ["--check", "5"])])
def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path, capsys, monkeypatch, package, options):
    without(monkeypatch, package)
    assert called("export", tmp_path, tmp_path / "policy.onnx", *options) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"found no {package}; pip install 'rookery[export]'" in err


def test_without_onnxruntime_the_file_is_written_unchecked(make_run, tmp_path, capsys, monkeypatch):
    run, _ = make_run()
    without(monkeypatch, "onnxruntime")
    monkeypatch.setattr(export, "to_onnx", lambda _: b"a model")
    monkeypatch.setattr(export, "_interface", lambda _: {})
    assert called("export", run.path, tmp_path / "policy.onnx") == 0
    assert "not done, because onnxruntime is not installed" in capsys.readouterr().out
    assert (tmp_path / "policy.onnx").read_bytes() == b"a model"


def test_bad_input_is_one_line(make_run, tmp_path, capsys):
    run, _ = make_run()
    for words, part in [
        ([run.path], "a run and a file are needed: found 1"),
        ([run.path, tmp_path / "absent" / "policy.onnx"], "no directory"),
        ([run.path, tmp_path], "a directory"),
        ([tmp_path / "nothing", tmp_path / "policy.onnx"], "no config.yaml"),
        ([run.path, tmp_path / "policy.onnx", "--checkpoint", "3"], "no such checkpoint"),
        ([run.path, tmp_path / "policy.onnx", "--check", "few"], "wanted a number"),
    ]:
        assert called("export", *words) == 2
        err = capsys.readouterr().err
        assert part in err
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_disk_that_refuses_leaves_the_file_of_before(make_run, tmp_path, capsys, monkeypatch, no_room):
    run, _ = make_run()
    file = tmp_path / "policy.onnx"
    file.write_text("an older one")
    monkeypatch.setattr(export, "to_onnx", lambda _: b"a model")
    with no_room():
        code = called("export", run.path, file, "--check", "0")
    assert code == 2
    assert "cannot be written" in capsys.readouterr().err
    assert file.read_text() == "an older one"
