"""Reading what services say about themselves."""

import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Summary, generate_latest

from common.observability.deployment import by_label
from services.cli.inspect.scrape import get, parse_metrics
from services.cli.train import status as status_module
from services.cli.train.status import RunStatus, fetch_metrics, fetch_status

pytestmark = pytest.mark.service

ANSWER = {
    "run_id": "r1",
    "preset": "pong",
    "seed": 1,
    "phase": "training",
    "solved": False,
    "wall_seconds": 75.2,
    "env_steps": 300_000,
    "frames": 1_200_000,
    "learner_updates": 73,
    "version": 73,
    "mean100": 12.34,
    "last_evaluation": {"version": 70, "mode": "greedy", "mean": 14.5, "episodes": 10},
    "evaluations": {"greedy": None, "sampled": None},
    "env_steps_per_second": 4000.0,
    "frames_per_second": {"last_10s": 16500.0, "last_60s": 16100.5, "run": 15957.4},
    "policy_lag": {"min": 0, "mean": 0.75, "max": 2},
    "queue": {"depth": 3, "capacity": 8},
    "target": {"mean100": 18.0, "env_steps": 3_000_000},
    "workers": {"actor": 2, "evaluator": 1},
    "ledger": {"produced": 309_216, "trained": 300_000, "queued": 6144, "in_flight": 2560, "dropped": {"stale": 512, "gap": 0}},
    "training": {"loss_policy": -0.01},
}


@pytest.fixture
def site(monkeypatch):
    """A loopback HTTP server: a dict of pages, and its address. On a busy machine it may need seconds to answer."""
    monkeypatch.setattr(status_module, "get", partial(get, timeout=120.0))
    pages = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            """Answer with a page, or 500 as a service in trouble does."""
            self.send_response(200 if self.path in pages else 500)
            self.end_headers()
            self.wfile.write(pages.get(self.path, "").encode())

        def log_message(self, *_):
            """Keep quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield pages, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_learners_answer_becomes_one_value():
    """All that the view shows is in it; what this version does not know is no error."""
    status = RunStatus.model_validate(ANSWER)
    assert (status.env_steps, status.policy_lag.mean, status.ledger.dropped["stale"]) == (300_000, 0.75, 512)
    assert status.last_evaluation.mean == 14.5
    assert status.frames_per_second.last_10s == 16500.0


def test_real_exposition_text_gives_phases_by_label():
    """The text comes from prometheus-client, with a summary."""
    registry = CollectorRegistry()
    phases = Counter("rookery_actor_phase_seconds", "seconds", ["phase"], registry=registry)
    phases.labels("env").inc(12.5)
    phases.labels("act").inc(3.0)
    Gauge("rookery_actor_queue_depth", "messages", registry=registry).set(2)
    Summary("rookery_actor_policy_lag_versions", "lag", registry=registry).observe(1)
    samples = parse_metrics(generate_latest(registry).decode())
    assert by_label(samples, "rookery_actor_phase_seconds_total") == {"env": 12.5, "act": 3.0}
    assert samples["rookery_actor_queue_depth", ""] == 2
    assert samples["rookery_actor_policy_lag_versions_sum", ""] == 1


def test_pages_are_fetched_over_http(site):
    """The two addresses that every run has."""
    pages, url = site
    pages.update({"/status": json.dumps(ANSWER), "/metrics": "# TYPE up gauge\nup 1\n"})
    assert fetch_status(url) == ANSWER
    assert fetch_metrics(url) == {("up", ""): 1.0}


def test_a_service_that_is_unreachable_or_fails_has_no_status(site):
    """While a service starts nobody listens, and a page may fail: neither may break the view."""
    _, url = site
    assert fetch_status(url) is None
    assert fetch_metrics("http://127.0.0.1:1") is None


@pytest.mark.parametrize("page", ["<html>It works!</html>", "", "[]", "[1, 2]", "7", "null", '"training"', "{"])
def test_another_program_on_the_port_has_no_status(site, page):
    """A web server took the port while the learner was restarted: what it shows is neither status nor metrics."""
    pages, url = site
    pages.update({"/status": page, "/metrics": f"not a metric at all\n{page} {{"})
    assert fetch_status(url) is None
    assert fetch_metrics(url) is None
