"""All checks of a run."""

from common.observability.checks import experience, learner, processes
from common.observability.checks.base import WAITING, Check, Finding, Threshold, findings

__all__ = ["CHECKS", "WAITING", "Check", "Finding", "Threshold", "findings"]

CHECKS: tuple[Check, ...] = (*learner.CHECKS, *experience.CHECKS, *processes.CHECKS)
