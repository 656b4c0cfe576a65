"""Targets of `rookery top` and `rookery doctor`, with services that do not answer and other HTTP servers."""

import json
import os
import socket
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from common.errors import RookeryError
from common.observability.deployment import compare
from common.observability.env_metrics import ENV_WORKER_METRICS, EnvWorkerStats
from common.observability.learner_metrics import METRICS
from common.observability.learner_stats import LearnerStats
from common.observability.metrics import Exporter, run_labels
from common.observability.worker_metrics import ACTOR_METRICS, ActorStats
from common.runtime.run_directory import RunDirectory
from services.cli.inspect import scrape as scrape_module
from services.cli.inspect.scrape import Prometheus, Services, open_source

pytestmark = pytest.mark.service

ACTOR, LEARNER = Exporter(ACTOR_METRICS, ActorStats).render(), Exporter(METRICS, LearnerStats).render()
ENV_WORKER = Exporter(ENV_WORKER_METRICS, EnvWorkerStats).render()
OK = {"/healthz": (200, b"ok\n")}


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine a server of the test may need seconds to answer."""
    monkeypatch.setattr(scrape_module, "DEADLINE", 60.0)
    monkeypatch.setattr(scrape_module, "TIMEOUT", 60.0)


@pytest.fixture
def serve():
    """Start HTTP servers: a dict of pages, path -> (status, body), or a function of the whole path; gives the address."""
    servers = []

    def start(pages):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                """One page, or 404."""
                code, body = pages(self.path) if callable(pages) else pages.get(self.path, (404, b"nothing here"))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Keep quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def deaf():
    """An address that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def opened(*words, prometheus=None, namespace=None, folder):
    """The source that a command line names."""
    return open_source(words, prometheus=prometheus, namespace=namespace, folder=folder)


def refused(*words, folder, **where):
    """The one line of an error, all of which end with exit code 2."""
    with pytest.raises(RookeryError) as caught:
        opened(*words, folder=folder, **where)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_services_are_asked_by_their_addresses(serve, tmp_path):
    """The role comes from the metrics, the health from /healthz."""
    learner = serve({"/metrics": (200, LEARNER)} | OK)
    actor = serve({"/metrics": (200, ACTOR), "/healthz": (503, b"loop has not ticked for 20.0 s\n")})
    moment = opened(learner, f"http://{actor}/metrics", folder=tmp_path).read()
    assert {name: (one.role, one.unhealthy, one.unreachable) for name, one in moment.items()} == {
        learner: ("learner", "", ""),
        actor: ("actor", "loop has not ticked for 20.0 s", ""),
    }
    assert moment[actor].samples["rookery_actor_policy_version", ""] == -1


def test_a_service_that_does_not_answer_is_one_of_the_samples(serve, deaf, tmp_path, monkeypatch):
    """One actor was killed and one hangs: the others are read, and nobody waits for long."""
    learner = serve({"/metrics": (200, LEARNER)} | OK)
    source = opened(learner, folder=tmp_path)
    source._urls |= {address: f"http://{address}" for address in ("127.0.0.1:1", deaf)}
    now = iter([0.0, 0.0, 0.0, 60.0])  # at the start, and when each of the three is waited for

    def monotonic():
        return next(now) if threading.current_thread() is threading.main_thread() else 0.0

    monkeypatch.setattr(scrape_module, "time", SimpleNamespace(monotonic=monotonic, time=time.time))
    moment = source.read()
    assert moment[learner].samples
    assert moment["127.0.0.1:1"].unreachable == "connection refused"
    assert moment[deaf].unreachable == "no answer within 60 s"


def test_the_time_between_two_pages_is_no_difference_of_clock_times(serve, tmp_path, monkeypatch):
    """The clock is put forward by a minute, and the first answer takes five seconds: counters are read at its end."""
    clock, takes = SimpleNamespace(unix=1000.0, monotonic=50.0), iter([5.0, 2.0, 5.0, 2.0, 0.0, 0.0])  # opening reads too

    def page(path):
        clock.monotonic += next(takes)
        return {"/metrics": (200, LEARNER)}.get(path, (200, b"ok\n"))

    times = SimpleNamespace(monotonic=lambda: clock.monotonic, time=lambda: clock.unix)
    monkeypatch.setattr(scrape_module, "time", times)
    source = opened(serve(page), folder=tmp_path)
    before = source.read()
    clock.unix, clock.monotonic = 1070.0, 72.0
    service = compare(before, source.read()).services[0]
    assert (service.seconds, service.after.at) == (10.0, 1070.0)


@pytest.mark.parametrize(
    "pages",
    [
        {"/metrics": (200, b"<html>It works!</html>")},
        {"/metrics": (200, b"\xff\xfe\x00")},
        {"/metrics": (200, b"# TYPE node_load1 gauge\nnode_load1 0.5\n")} | OK,
        {"/metrics": (404, b"no such page")},
        {"/metrics": (200, b"")},
    ],
)
def test_a_foreign_endpoint_is_refused_with_a_line(serve, tmp_path, pages):
    """Another program has that port: HTML, bytes, the metrics of something else, or nothing."""
    address = serve(pages)
    line = refused(address, folder=tmp_path)
    assert line.startswith(f"this is no rookery service: found another HTTP server at {address}")


@pytest.fixture
def proxy(serve, monkeypatch):
    """Sets a proxy for all addresses, which finds no page; gives the paths that it was asked for."""
    asked = []

    def pages(path):
        asked.append(path)
        return 502, b"no way there"

    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://{serve(pages)}")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it has the proxies of its first use
    return asked


def test_services_are_asked_directly_and_a_prometheus_through_the_proxy_of_the_environment(serve, proxy, tmp_path):
    learner = serve({"/metrics": (200, LEARNER)} | OK)
    assert opened(learner, folder=tmp_path).read()[learner].role == "learner"
    assert proxy == []
    refused(prometheus="http://prometheus.example:9090", folder=tmp_path)
    assert proxy[0].startswith("http://prometheus.example:9090/api/v1/query?")


def test_an_env_worker_is_a_service_like_the_others(serve, tmp_path):
    address = serve({"/metrics": (200, ENV_WORKER)} | OK)
    assert opened(address, folder=tmp_path).read()[address].role == "env_worker"


def test_an_answer_without_end_is_cut(serve, tmp_path, monkeypatch):
    """A stream of metrics would fill the memory."""
    monkeypatch.setitem(scrape_module.get.__kwdefaults__, "limit", 1000)
    assert "no rookery service" in refused(serve({"/metrics": (200, ACTOR)} | OK), folder=tmp_path)


@pytest.mark.parametrize(
    ("word", "hints"),
    [
        ("tcp://127.0.0.1:5700", ["tcp://127.0.0.1:5700", "port of its metrics"]),
        ("runs/nothing", ["'runs/nothing'", "a run directory"]),
        ("localhost", ["'localhost'", "127.0.0.1:9100"]),
        ("host:99999", ["'host:99999'"]),
        ("https://host:9100", ["https://host:9100"]),
        ("file:///etc/passwd", ["file:///etc/passwd"]),
        ("[::1]:1", ["no service answers", "at [::1]:1"]),
        ("127.0.0.1:1", ["no service answers", "connection refused at 127.0.0.1:1"]),
    ],
)
def test_what_is_no_target_is_refused_with_a_line(tmp_path, word, hints):
    """Found, wanted, fix."""
    line = refused(word, folder=tmp_path)
    for hint in hints:
        assert hint in line


def announce(path, **addresses):
    """A run directory with the addresses of its services."""
    path.mkdir(parents=True)
    RunDirectory(path).config.touch()
    RunDirectory(path).addresses.write_text(json.dumps({name: f"http://{address}" for name, address in addresses.items()}))
    return path


def test_a_run_directory_names_its_services(serve, tmp_path):
    """By the names of the view, not by ports that were chosen at random."""
    run = announce(
        tmp_path / "mine", learner=serve({"/metrics": (200, LEARNER)} | OK), actor=serve({"/metrics": (200, ACTOR)} | OK)
    )
    moment = opened(str(run), folder=tmp_path).read()
    assert {name: one.role for name, one in moment.items()} == {"learner": "learner", "actor": "actor"}


def test_another_run_at_the_port_of_a_killed_one_is_not_taken_for_it(serve, tmp_path):
    """The run was killed with its supervisor, and the next one got its port: its numbers stood under the dead run's name."""
    stats = LearnerStats()
    stats.run = run_labels(run_id="new", env="CartPole-v1", algorithm="ppo", seed=1)
    run = announce(tmp_path / "dead", learner=serve({"/metrics": (200, Exporter(METRICS, lambda: stats).render())} | OK))
    RunDirectory(run).config.write_text("run: {id: dead}")
    line = refused(str(run), folder=tmp_path)
    assert line.startswith("no service answers: found another run answers, new instead of dead at learner")
    assert f"found {run}, where no service answers" in refused(folder=tmp_path)
    RunDirectory(run).config.write_text("run: {id: new}")
    assert opened(str(run), folder=tmp_path).read()["learner"].samples


def test_a_service_that_was_killed_has_the_role_in_its_name(serve, tmp_path):
    """It cannot state its role, and the run directory names it."""
    run = announce(tmp_path / "mine", **{"learner": "127.0.0.1:1", "actor-0": serve({"/metrics": (200, ACTOR)} | OK)})
    moment = opened(str(run), folder=tmp_path).read()
    assert {name: (one.role, one.unreachable) for name, one in moment.items()} == {
        "learner": ("learner", "connection refused"), "actor-0": ("actor", ""),
    }  # fmt: skip


def test_a_run_that_is_over_has_no_addresses(tmp_path):
    """Its directory stays."""
    (tmp_path / "old").mkdir()
    assert refused(str(tmp_path / "old"), folder=tmp_path).startswith("no run is under way there: found ")


def test_without_a_target_it_is_the_newest_run_that_answers(serve, tmp_path):
    """The newest one was killed with its supervisor, and left its addresses behind."""
    learner = {"/metrics": (200, LEARNER)} | OK
    addresses = {"first": serve(learner), "second": serve(learner), "killed": "127.0.0.1:1"}
    for number, (name, address) in enumerate(addresses.items()):
        os.utime(RunDirectory(announce(tmp_path / name, learner=address)).addresses, (number, number))
    assert opened(folder=tmp_path).title == str(tmp_path / "second")


def test_another_server_at_the_port_of_a_killed_run_hides_no_other_run(serve, tmp_path):
    """`rookery top` ended with "this is no rookery service", although a run was in progress."""
    web = serve({})
    for number, (name, address) in enumerate({"alive": serve({"/metrics": (200, LEARNER)} | OK), "killed": web}.items()):
        os.utime(RunDirectory(announce(tmp_path / name, learner=address)).addresses, (number, number))
    assert opened(folder=tmp_path).title == str(tmp_path / "alive")
    RunDirectory(tmp_path / "alive").addresses.unlink()
    assert f"{tmp_path / 'killed'}, where no service answers (another HTTP server at learner)" in refused(folder=tmp_path)


def test_of_two_run_directories_none_is_shown_under_the_names_of_both(serve, tmp_path):
    """The services of both have the same names: the table was of the second alone."""
    first, second = (str(announce(tmp_path / name, learner=serve({"/metrics": (200, LEARNER)} | OK))) for name in ("a", "b"))
    line = refused(first, second, folder=tmp_path)
    assert line.startswith(f"two runs: found learner in {first} and {second}, wanted one of them")
    assert opened(first, first, folder=tmp_path).read().keys() == {"learner"}


def test_a_run_of_a_series_is_found_without_a_target_and_in_the_folder_of_the_series(serve, tmp_path):
    """Each member keeps its files in a folder of its own, and one that has ended has no addresses."""
    member = announce(tmp_path / "runs" / "series" / "s2", learner=serve({"/metrics": (200, LEARNER)} | OK))
    RunDirectory(announce(tmp_path / "runs" / "series" / "s1")).addresses.unlink()
    for named in ([], [str(member.parent)], [str(member)]):
        assert opened(*named, folder=tmp_path / "runs").title == str(member)
    RunDirectory(member).addresses.unlink()
    assert refused(str(member.parent), folder=tmp_path).startswith(
        f"no run is under way there: found none under {member.parent}/"
    )


def test_folders_that_may_not_be_entered_hide_no_run(serve, tmp_path, monkeypatch):
    """A colleague's, or lost+found: they ended `rookery top` in a traceback. Neither does a config.yaml beside the runs."""
    member = announce(tmp_path / "runs" / "mine", learner=serve({"/metrics": (200, LEARNER)} | OK))
    (tmp_path / "runs" / "config.yaml").touch()
    (tmp_path / "runs" / "private").mkdir()
    is_file = Path.is_file

    def stat(path):
        if path.parent.name == "private":
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", stat)
    assert opened(folder=tmp_path / "runs").title == str(member)


def test_a_run_that_does_not_answer_is_named(tmp_path):
    """It hangs, or its supervisor was killed: the reader knows where to look."""
    run = announce(tmp_path / "killed", learner="127.0.0.1:1")
    assert f"found {run}, where no service answers (connection refused at learner)" in refused(folder=tmp_path)


def test_where_no_run_is_under_way_the_line_says_what_to_give(tmp_path):
    """The first thing that somebody on another machine types."""
    line = refused(folder=tmp_path / "runs")
    assert line.startswith("no run is under way here: found none under ")
    assert "--prometheus" in line


# --- Prometheus ---

SERIES = [
    ({"__name__": "rookery_learner_policy_version", "job": "learner", "instance": "l:9100", "namespace": "r"}, "7"),
    ({"__name__": "rookery_learner_phase_seconds_total", "job": "learner", "instance": "l:9100", "phase": "wait"}, "2.5"),
    ({"__name__": "rookery_actor_policy_version", "instance": "a:9100", "pod": "actor-x7"}, "6"),
    ({"__name__": "process_cpu_seconds_total", "instance": "node:9100", "job": "node"}, "99"),
]
STAMPS = [({"instance": "l:9100"}, "1000.5"), ({"instance": "a:9100", "pod": "actor-x7"}, "998")]


def answer(series):
    """As Prometheus answers an instant query."""
    result = [{"metric": labels, "value": [1000.0, value]} for labels, value in series]
    return 200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


@pytest.fixture
def prometheus(serve):
    """A Prometheus that has scraped a learner, an actor and a machine, and remembers what it was asked."""
    asked = []

    def pages(path):
        query = parse_qs(urlsplit(path).query)
        asked.append(query)
        return answer(STAMPS if query["query"][0].startswith("timestamp(") else SERIES)

    return f"http://{serve(pages)}/", asked


def test_a_prometheus_gives_the_same_readings(prometheus, tmp_path):
    """By target, at the time of its scrape; what is no service of ours is left out."""
    url, _ = prometheus
    moment = opened(prometheus=url, folder=tmp_path).read()
    assert {name: (one.role, one.at) for name, one in moment.items()} == {
        "l:9100": ("learner", 1000.5),
        "actor-x7": ("actor", 998.0),
    }
    assert moment["l:9100"].samples["rookery_learner_phase_seconds_total", "wait"] == 2.5


def test_pods_of_one_name_in_two_namespaces_are_two_services(serve, tmp_path):
    """A learner's pod is learner-0 in each; the values of two of them made one diagnosis, of neither."""
    labels = [{"namespace": name, "pod": "learner-0", "instance": "learner-0"} for name in ("run-a", "run-b")]
    series = [({"__name__": "rookery_learner_policy_version"} | one, str(version)) for version, one in enumerate(labels)]

    def pages(path):
        return answer([(one, "1000") for one in labels] if "query=timestamp" in path else series)

    moment = opened(prometheus=f"http://{serve(pages)}/", folder=tmp_path).read()
    versions = {name: one.samples["rookery_learner_policy_version", ""] for name, one in moment.items()}
    assert versions == {"run-a/learner-0": 0.0, "run-b/learner-0": 1.0}


@pytest.mark.parametrize(("overdue", "fault"), [("0", ""), ("3300", "its loop should have ticked 3,300 s ago")])
def test_a_loop_that_hangs_is_known_by_its_metric(serve, tmp_path, overdue, fault):
    """A Prometheus does not ask /healthz, and the other metrics are those of a long gradient step."""
    series = [*SERIES[:2], ({"__name__": "rookery_loop_overdue_seconds", "job": "learner", "instance": "l:9100"}, overdue)]
    url = f"http://{serve(lambda path: answer(STAMPS[:1] if 'query=timestamp' in path else series))}"
    moment = opened(prometheus=url, folder=tmp_path).read()
    assert moment["l:9100"].unhealthy == fault


def test_a_target_that_a_prometheus_cannot_scrape_is_unreachable(serve, tmp_path):
    """Its series are stale, and `up` names its job; the target of another job is no service of a run."""
    down = [({"__name__": "up", "job": job, "instance": f"{job}:9100"}, "0") for job in ("learner", "node")]
    up = [({"__name__": "up", "instance": "a:9100", "pod": "actor-x7", "job": "actor"}, "1")]

    def pages(path):
        return answer(STAMPS[1:] if "query=timestamp" in path else [SERIES[2], *down, *up])

    moment = opened(prometheus=f"http://{serve(pages)}", folder=tmp_path).read()
    assert {name: (one.role, one.unreachable) for name, one in moment.items()} == {
        "learner:9100": ("learner", "Prometheus could not scrape it"), "actor-x7": ("actor", ""),
    }  # fmt: skip


def test_a_prometheus_is_asked_for_the_past(prometheus):
    """Samples of a minute ago are kept: no wait is needed."""
    url, asked = prometheus
    Prometheus(url).read(60.0)
    Prometheus(url).read()
    then, now = (float(asked[number]["time"][0]) for number in (0, 2))
    assert (
        59.0 < now - then < 60.0 + 180.0
    )  # between two requests of a busy machine may be minutes, and no more than pytest allows


@pytest.mark.parametrize(
    ("page", "hint"),
    [
        (answer([]), "this Prometheus has no metrics of rookery"),
        (answer(SERIES[-1:]), "this Prometheus has no metrics of rookery"),
        ((200, b"<html>"), "no Prometheus answers there"),
        ((200, b'{"status": "success"}'), "no Prometheus answers there"),
        ((200, b"[1]"), "no Prometheus answers there"),
        ((404, b"nothing"), "no Prometheus answers there"),
    ],
)
def test_a_prometheus_that_is_none_or_knows_nothing_of_us_is_refused(serve, tmp_path, page, hint):
    """The wrong address, or the services are not among its targets."""
    assert hint in refused(prometheus=f"http://{serve(lambda _: page)}", folder=tmp_path)


def test_a_prometheus_that_is_unreachable_is_named(tmp_path):
    """Its port, its host, and why."""
    assert refused(prometheus="http://127.0.0.1:1", folder=tmp_path).startswith(
        "the Prometheus does not answer: found connection refused at http://127.0.0.1:1"
    )


@pytest.mark.parametrize("url", ["127.0.0.1:9090", "tcp://host:1", "http://", "file:///etc/passwd"])
def test_what_is_no_base_address_is_refused(url, tmp_path):
    """Before anything is asked."""
    assert "no Prometheus answers there" in refused(prometheus=url, folder=tmp_path)


def test_one_does_not_read_from_two_places(tmp_path):
    """Two sources could disagree."""
    assert "one of them" in refused("runs", prometheus="http://127.0.0.1:1", folder=tmp_path)


def test_a_namespace_narrows_what_a_prometheus_is_asked(prometheus, tmp_path):
    """A cluster has several runs, each in its own."""
    url, asked = prometheus
    opened(prometheus=url, namespace="run-7", folder=tmp_path)
    assert all('namespace="run-7"' in query["query"][0] for query in asked)


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ({"prometheus": "http://127.0.0.1:1", "namespace": 'x"} or up{'}, "no such namespace"),
        ({"namespace": "x"}, "--prometheus URL"),
    ],
)
def test_what_is_no_namespace_is_refused(where, hint, tmp_path):
    """It goes into a query, and means nothing without one."""
    assert hint in refused(folder=tmp_path, **where)


def test_a_reading_takes_no_longer_than_its_deadline(monkeypatch):
    """A service that drips its answer byte by byte resets every timeout of a socket."""
    monkeypatch.setattr(scrape_module, "DEADLINE", 0.2)
    held = threading.Event()
    monkeypatch.setattr(scrape_module, "_ask", lambda _: held.wait(30.0))
    moment = Services({"one": "http://127.0.0.1:1"}, title="").read()
    held.set()
    assert moment["one"].unreachable == "no answer within 0.2 s"
