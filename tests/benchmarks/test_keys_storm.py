"""Test of the storm of strangers at a tenth of its size: a connection counted as refused was refused."""

import pytest

from benchmarks.keys_storm import KINDS, Served, storm

pytestmark = pytest.mark.wire


def test_no_stranger_gets_a_message_in(tmp_path):
    """Fifty each with an unknown key, another learner's key, no key and a password, beside one worker that is served."""
    served = Served(tmp_path)
    served.start()
    counts = storm(served.learner.endpoint, 200, seed=1, learner_key=served.key)
    received = served.end()
    assert counts == {f"{kind}: refused": 50 for kind in KINDS}
    assert received["worker"] > 0
    assert received["stranger"] == 0
