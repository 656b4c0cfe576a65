"""How many minibatches the experience that came in pays for: the law that ties gradient steps to env steps.

Knows no queue and no clock. Inserts come when they come; whoever trains asks what is owed, and does just that.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import ConfigError
from common.units import EnvSteps


class Governor:
    """Holds (samples drawn) / (env steps inserted after the warm-up) at `samples_per_insert`, from below.

    With I env steps inserted since the warm-up, D samples drawn, ratio r and minibatches of b samples:

        after the owed minibatches were drawn    r I - b     < D <= r I
        at any time                              r I - b - r M < D <= r I,   M the largest insert since nothing was owed

    The ratio D/I that is measured after an update is thus within b/I below r, whatever the timing. It cannot deadlock:
    it never asks for an insert to be held back, only for as many minibatches as the inserts have paid for.
    """

    def __init__(self, *, samples_per_insert: float, batch: int, warm_up: EnvSteps = 0) -> None:
        """Owe nothing for the first `warm_up` env steps. Raises `ConfigError` for a ratio or a batch that is not positive."""
        if not 0 < samples_per_insert < float("inf"):
            raise ConfigError("samples per insert", found=samples_per_insert, wanted="a number above 0")
        if batch < 1:
            raise ConfigError("samples in a minibatch", found=batch, wanted="at least 1")
        self.samples_per_insert = samples_per_insert
        self.batch = batch
        self.warm_up = warm_up
        self.env_steps: EnvSteps = 0  # inserted so far, those of the warm-up included
        self.minibatches = 0  # drawn so far

    @property
    def warm(self) -> bool:
        """Whether the warm-up is over."""
        return self.env_steps >= self.warm_up

    @property
    def owed(self) -> int:
        """Minibatches to draw now, >= 0."""
        paid = self.samples_per_insert * max(0, self.env_steps - self.warm_up)
        return max(0, int(paid // self.batch) - self.minibatches)

    @property
    def ratio(self) -> float:
        """Samples drawn per env step inserted since the warm-up; 0 before."""
        paying = self.env_steps - self.warm_up
        return self.minibatches * self.batch / paying if paying > 0 else 0.0

    def inserted(self, env_steps: EnvSteps) -> None:
        """Count experience that came in."""
        self.env_steps += env_steps

    def drew(self, minibatches: int = 1) -> None:
        """Count minibatches that were drawn."""
        self.minibatches += minibatches

    def state_dict(self) -> dict[str, float]:
        """Return the counts, and the settings that they were made with. JSON values."""
        settings = {"samples_per_insert": self.samples_per_insert, "batch": self.batch, "warm_up": self.warm_up}
        return settings | {"env_steps": self.env_steps, "minibatches": self.minibatches}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state_dict`. With other settings, data inserted before adds no gradient steps."""
        self.env_steps, self.minibatches = int(state["env_steps"]), int(state["minibatches"])
        if self.state_dict() != state:
            self.minibatches = 0
            self.minibatches = self.owed
