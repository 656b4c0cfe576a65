"""A run with keys, as real processes: it trains, and no secret is anywhere but in its file."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from common.transport.curve import ServerKeys, WorkerKeys

pytestmark = pytest.mark.system


def keys(colony, *words):
    """Run `rookery keys` in the colony's folder; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "keys", *words], cwd=colony.folder, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_a_run_with_keys_trains_and_no_secret_leaves_its_file(colony, wait):
    """Logs, metrics, status, settings, run directory with its checkpoints: all that an operator copies, scrapes or posts."""
    said = [keys(colony, "keys", "worker", "unlisted")]
    secrets = [ServerKeys.of(str(colony.folder / "keys" / "learner")).secret]
    secrets += [WorkerKeys.of(str(colony.folder / "keys" / name)).secret for name in ("worker", "unlisted")]
    (colony.folder / "keys" / "learner" / "unlisted.key").unlink()

    learner = colony.learner("--keys", "keys/learner")
    own = "--keys", "keys/worker"
    workers = [colony.worker("actor", "one", *own), colony.worker("evaluator", "evaluator", *own)]
    unlisted = colony.worker("actor", "two", "--keys", "keys/unlisted")
    wait(lambda: learner.http.status().get("env_steps", 0) > 300, "it trains")
    wait(colony.checkpoints, "there is a checkpoint")
    refused = "rookery_learner_handshakes_failed_total"
    wait(lambda: learner.http.metric(refused, reason="key") >= 2, "each refused handshake is counted")
    wait(lambda: "the learner does not allow key" in unlisted.output, "the worker logs the reason")
    wait(lambda: "handshake_failed" in learner.output, "the learner logs the key")
    assert learner.http.status()["workers"]["actor"] == 1
    assert [learner.http.metric(refused, reason=reason) for reason in ("learner_key", "mechanism")] == [0.0, 0.0]

    said += [
        service.http.get(path)[1].decode() for service in (learner, *workers) for path in ("/metrics", "/status", "/healthz")
    ]
    show = [sys.executable, "-m", "services.cli", "config", "show", str(colony.run_dir / "config.yaml")]
    said.append(subprocess.run(show, cwd=colony.folder, capture_output=True, text=True, check=True).stdout)
    assert f"keys: {colony.folder / 'keys' / 'learner'}" in said[-1]
    learner.signal(signal.SIGTERM)  # while it trains, it removes checkpoints
    learner.ended()
    said += [service.output for service in (learner, *workers, unlisted)]
    written = [path.read_bytes() for path in colony.run_dir.rglob("*") if path.is_file()]
    assert written
    for secret in secrets:
        assert not any(secret.decode() in text for text in said)
        assert not any(secret in content for content in written)
