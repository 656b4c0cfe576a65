"""Test of the storm of unknown senders at a tenth of its size: a connection counted as refused was refused."""

import pytest

from benchmarks import keys_storm
from benchmarks.keys_storm import KINDS, Served, storm

pytestmark = pytest.mark.wire


def test_no_message_of_an_unknown_sender_arrives(tmp_path, monkeypatch):
    """Fifty each with an unknown key, another learner's key, no key and a password, beside one worker that is served."""
    monkeypatch.setattr(keys_storm, "PATIENCE_MS", 300_000)
    served = Served(tmp_path)
    served.start()
    counts = storm(served.learner.endpoint, 200, seed=1, learner_key=served.key)
    received = served.end()
    assert counts == {f"{kind}: refused": 50 for kind in KINDS}
    assert received["worker"] > 0
    assert received["unknown sender"] == 0
