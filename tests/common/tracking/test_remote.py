"""Tests of the trackers with a package of their own, against what the real packages store and send."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from common.tracking.background import BackgroundTracker, Point, TrackedRun
from common.tracking.remote import REMOTE, RUN_TAG
from tests.ports import free_ports

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

PATIENCE = 120.0  # only a fault lets it pass


def needs(package):
    """Skip without the package; importing it here would take seconds."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs the extra {package}")


def tracked(folder, **settings):
    known = {"env.id": "CartPole-v1", "algorithm.learning_rate": 0.001} | settings
    return TrackedRun(run_id="cartpole-1-abc", name="cartpole-s1", folder=folder, settings=known, hyperparameters={})


def points(*env_steps):
    return [Point(env_steps=step, unix_seconds=1e9 + step, values={"train/loss": step / 2}) for step in env_steps]


class Handler(BaseHTTPRequestHandler):
    """The part of MLflow's REST interface that a client uses for experiments, runs, parameters and metrics."""

    def do_GET(self):
        self.answer(parse_qs(urlsplit(self.path).query))

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}"))

    def log_message(self, *_):
        pass

    def answer(self, body):
        self.server.requests.append(self.path)
        found = getattr(self, re.sub(r"\W", "_", urlsplit(self.path).path.partition("/mlflow/")[2]))(body)
        status = 404 if found is None else 200
        text = json.dumps({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"} if found is None else found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def experiments_get_by_name(self, body):
        name = body["experiment_name"][0]
        return {"experiment": {"experiment_id": "1", "name": name}} if name in self.server.experiments else None

    def experiments_create(self, body):
        self.server.experiments.append(body["name"])
        return {"experiment_id": "1"}

    def runs_search(self, body):
        wanted = re.search(r"'(.*)'", body["filter"])[1]
        return {"runs": [run for run in self.server.runs if run["data"]["tags"][0]["value"] == wanted]}

    def runs_create(self, body):
        info = {"run_id": f"r{len(self.server.runs)}", "experiment_id": "1", "run_name": body["run_name"], "status": "RUNNING"}
        self.server.runs.append({"info": info, "data": {"tags": body["tags"], "params": [], "metrics": []}})
        return {"run": self.server.runs[-1]}

    def runs_get(self, _):
        return {"run": self.server.runs[0]}

    def runs_update(self, body):
        self.server.runs[0]["info"]["status"] = body["status"]
        return {"run_info": self.server.runs[0]["info"]}

    def runs_log_batch(self, body):
        self.server.runs[0]["data"]["metrics"] += body.get("metrics", [])
        self.server.runs[0]["data"]["params"] += body.get("params", [])
        return {}

    def runs_log_metric(self, body):
        self.server.runs[0]["data"]["metrics"].append(body)
        return {}

    def runs_set_tag(self, body):
        self.server.runs[0]["data"]["tags"].append(body)
        return {}

    def runs_delete_tag(self, body):
        data = self.server.runs[0]["data"]
        data["tags"] = [tag for tag in data["tags"] if tag["key"] != body["key"]]
        return {}


@contextmanager
def mlflow_server(*, port=0, runs=None):
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.runs, server.experiments, server.requests = [] if runs is None else runs, [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def metrics(runs, key):
    return [(int(metric["step"]), metric["value"]) for metric in runs[0]["data"]["metrics"] if metric["key"] == key]


@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_mlflow_gets_settings_and_curves_and_those_of_the_time_without_a_server(tmp_path, monkeypatch):
    """The server goes away in the middle and comes back; then the run is resumed with another setting."""
    (port,) = free_ports(1)
    with mlflow_server(port=port) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", f"{PATIENCE:.0f}")
        monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
        events, written = [], threading.Event()

        def report(event, **_):
            events.append(event)
            written.set()

        monkeypatch.setattr("common.tracking.background._log", SimpleNamespace(warning=report, info=report))
        tracker = BackgroundTracker("mlflow", lambda: REMOTE["mlflow"](tracked(tmp_path)), retry_seconds=0.01)
        for point in points(100, 200):
            tracker.write(point)
        deadline = time.monotonic() + PATIENCE
        while not (server.runs and len(metrics(server.runs, "train/loss")) == 2):
            assert time.monotonic() < deadline, (events, server.requests)
            written.wait(0.01)
        written.clear()
    for point in points(300, 400):
        tracker.write(point)
    assert written.wait(PATIENCE), "the loss is reported"
    with mlflow_server(port=port, runs=server.runs) as server:
        server.experiments.append("rookery")
        tracker.finish({"mean100": 200.0}, complete=False)
        tracker.close(time.monotonic() + PATIENCE)
        assert events == ["tracker_lost", "tracker_resumed"]
        assert tracker.dropped == 0
        resumed = REMOTE["mlflow"](tracked(tmp_path, **{"algorithm.learning_rate": 0.002, "run.seed": 1}))
        resumed.write(points(500))
        resumed.finish({"mean100": 300.0}, complete=True)
    (run,) = server.runs
    assert metrics([run], "train/loss") == [(step, step / 2) for step in (100, 200, 300, 400, 500)]
    assert {entry["key"]: entry["value"] for entry in run["data"]["params"]} == {
        "env.id": "CartPole-v1",
        "algorithm.learning_rate": "0.001",
        "run.seed": "1",
    }
    assert run["data"]["tags"][-1]["value"] == "0.002"
    assert [value for _, value in metrics([run], "result/mean100")] == [200.0, 300.0]
    assert run["info"]["status"] == "FINISHED"
    with mlflow_server(port=port, runs=server.runs) as server:
        server.experiments.append("rookery")
        REMOTE["mlflow"](tracked(tmp_path))
    changed = {tag["key"]: tag["value"] for tag in run["data"]["tags"] if tag["key"] != RUN_TAG}
    assert changed == {"changed.run.seed": "none"}, "one setting is back at its first value, the other has none any more"


@needs("mlflow")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_mlflow_gets_names_that_it_takes(tmp_path, monkeypatch):
    weights = {"env.kwargs.weights.x>0": 1, "env.kwargs.weights.x<0": 2}
    with mlflow_server() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        for settings in (weights, weights, {"env.kwargs.weights.x>0": 3}):
            tracker = REMOTE["mlflow"](tracked(tmp_path, **settings))
        tracker.write([Point(env_steps=1, unix_seconds=1e9, values={"train/KL(p,q)": 1.0, f"train//{'x' * 300}": 2.0})])
        (data,) = (run["data"] for run in server.runs)
    assert [entry["key"] for entry in data["metrics"]] == ["train/KL_p_q_", f"train/{'x' * 243}"]
    assert [entry["value"] for entry in data["params"] if entry["key"] == "env.kwargs.weights.x_0"] == ["2"]
    assert [(tag["key"], tag["value"]) for tag in data["tags"][1:]] == [("changed.env.kwargs.weights.x_0", "3")]


def wandb_records(folder):
    """The records of all files of W&B under a run directory, which have the format of LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            record += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                yield Record.FromString(record)
                record = b""


@needs("wandb")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_offline_keeps_settings_curves_and_result_under_the_id_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in [name for name in os.environ if name.startswith("WANDB_") and name != "WANDB_MODE"]:
        monkeypatch.delenv(name)
    tracker = REMOTE["wandb"](tracked(tmp_path))
    tracker.write(points(100, 200))
    tracker.finish({"mean100": 200.0}, complete=True)
    tracker.close()
    import wandb

    wandb.teardown()
    records = list(wandb_records(tmp_path))
    begun = next(record.run for record in records if record.HasField("run"))
    assert begun.run_id == "cartpole-1-abc"
    config = {entry.key: json.loads(entry.value_json) for entry in begun.config.update}
    assert (config["env.id"], config["algorithm.learning_rate"]) == ("CartPole-v1", 0.001)
    rows = [
        {entry.key or entry.nested_key[0]: json.loads(entry.value_json) for entry in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["env_steps"], row["train/loss"], row["_timestamp"]) for row in rows] == [
        (100, 50.0, 1e9 + 100),
        (200, 100.0, 1e9 + 200),
    ]
    summaries = [entry for record in records if record.HasField("summary") for entry in record.summary.update]
    assert [json.loads(entry.value_json) for entry in summaries if "result/mean100" in (entry.key, *entry.nested_key)] == [200.0]
