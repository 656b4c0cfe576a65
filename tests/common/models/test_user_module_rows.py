"""The check that a network computes each row of a batch alone."""

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from common.models.user_module import require_independent_rows

pytestmark = pytest.mark.pure


class Function(nn.Module):
    """A network without parameters."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


class Recurrent(nn.Module):
    """Takes the rows of a batch for the steps of a sequence, as a first attempt with an LSTM does."""

    def __init__(self, **options):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, **options)

    def forward(self, observation):
        return self.lstm(observation)[0]


class RunningSum(nn.Module):
    """Keeps a sum over all calls."""

    sum = 0.0

    def forward(self, observation):
        self.sum = self.sum + observation.sum()
        return observation + self.sum


@pytest.mark.parametrize(
    "module",
    [
        Recurrent(),
        Recurrent(bidirectional=True),
        RunningSum(),
        nn.BatchNorm1d(4, track_running_stats=False),
        Function(lambda observation: observation - observation.mean(0)),
        Function(lambda observation: observation.roll(1, 0)),
        Function(lambda observation: observation.cumsum(0)),
        Function(lambda observation: observation.flip(0).cumsum(0)),
    ],
)
def test_a_network_that_mixes_rows_is_refused(module):
    with pytest.raises(
        ConfigError, match=r"own:Net mixes the rows of a batch: found .* wanted .*; set model\.recurrent for an LSTM"
    ):
        require_independent_rows(module, (4,), "own:Net")


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 64), nn.LayerNorm(64), nn.Dropout(0.5), nn.Tanh()),
        Function(lambda observation: observation + torch.randn(observation.shape)),
        Function(lambda observation: observation / 0.0 * 0.0),
    ],
)
def test_dropout_noise_and_values_that_are_not_finite_mix_no_rows(module):
    state = torch.get_rng_state()
    require_independent_rows(module, (4,), "own:Net")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(part.training for part in module.modules())


def test_a_network_that_fails_is_refused():
    def fails(observation):
        raise ValueError("too bright")

    with pytest.raises(ConfigError, match="own:Net fails on an observation: found ValueError: too bright"):
        require_independent_rows(Function(fails), (4,), "own:Net")
