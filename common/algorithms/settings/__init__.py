"""Section `algorithm` of the configuration: one class per algorithm, told apart by `name`.

Apart from the algorithms, which need torch: whoever reads a configuration need not wait seconds for it.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from common.algorithms.settings.a3c import A3CGradSettings, A3CSettings
from common.algorithms.settings.dqn import DQNSettings
from common.algorithms.settings.impala import ImpalaSettings
from common.algorithms.settings.ppo import PPOSettings
from common.algorithms.settings.td3 import TD3Settings

AlgorithmSettings: TypeAlias = Annotated[
    PPOSettings | ImpalaSettings | A3CSettings | A3CGradSettings | DQNSettings | TD3Settings, Field(discriminator="name")
]
"""The union of all of them."""
