"""The GPU benchmark: its parts on the CPU at a tiny size, and its answer where there is no GPU. Speed is not tested."""

import pytest
import torch

from benchmarks import gpu
from common.config.load import load_settings

pytestmark = pytest.mark.service

CPU = torch.device("cpu")
TINY = ("env.num_envs=2", "rollout.length=4", "algorithm.minibatch=8", "model.conv=[[4,8,4]]", "model.hidden=[8]")


def test_without_a_gpu_one_line_says_that_nothing_was_run(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("not run: there is no GPU")


def test_an_update_is_measured_on_random_experience():
    settings = load_settings(preset=gpu.PRESET, overrides=TINY, environ={}).settings
    found = gpu.measure_update(settings, CPU, seconds=0.0)
    assert found.env_steps == 2 * 2 * 4
    assert min(found.update, found.ingest) > 0.0
    assert "16 env steps: update" in str(found)
    assert "cores busy" in str(found)


def test_the_pipeline_is_that_of_the_device_with_a_batch_of_each_actor(watched):
    runs = watched(gpu)
    line = gpu.measure_pipeline(CPU, 3, TINY, seconds=2.0)
    (run,) = runs
    assert (run.settings.learner.device, run.settings.actor.count, run.settings.learner.batch) == ("cpu", 3, 3)
    assert "100 env steps/s trained, 3 actors" in line


@pytest.mark.parametrize(
    ("solved", "words"),
    [({"wall_seconds": 120.0, "env_steps": 5}, "solved after 2.0 minutes, 5 env steps"), (None, "not solved within 9 env steps")],
)
def test_pong_is_trained_on_the_device(monkeypatch, solved, words):
    def train(preset, _seed, _folder, overrides):
        assert (preset, overrides) == ("pong", ("learner.device=cpu",))
        return {"solved_at": solved, "env_steps": 9}

    monkeypatch.setattr(gpu, "train", train)
    assert words in gpu.measure_pong(CPU)


@pytest.mark.parametrize(("printed", "share"), [("40\n60\n", 0.5), ("[N/A]\n", None), ("", None)])
def test_the_share_of_the_gpu_is_the_mean_of_the_readings(printed, share):
    assert gpu.share_of(printed) == share
