"""Scrapes of a deployment for `rookery top` and `rookery doctor`: from the services themselves, or from a Prometheus.

Each request has a limit of time and size; the sample of a service that does not answer has the reason.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

from common.errors import ConfigError, ResourceError
from common.observability.deployment import JOBS, ROLES, Samples, Scrape, ServiceSample, by_label, role_of
from common.observability.learner_metrics import RUN_INFO
from common.observability.metrics import LABEL_CHARACTERS, LOOP_OVERDUE
from common.runtime.run_directory import DEPTH, RunDirectory, run_folders
from common.runtime.store import run_id
from common.units import MIB, Seconds

PAGE_TIMEOUT: Seconds = 0.5
MAX_PAGE_BYTES = 16 * MIB
DEADLINE: Seconds = 5.0  # for all requests to one service
TIMEOUT: Seconds = 2.0  # of one step of one request
PROMETHEUS_TIMEOUT: Seconds = 10.0
PROMETHEUS_LIMIT = 64 * MIB
TARGETS = "a run directory, a folder of such, or addresses of services such as 127.0.0.1:9100 (metrics.host, metrics.port)"

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ADDRESS = re.compile(r"(?:http://)?((?:[^/\s:@?#\[\]]+|\[[0-9a-fA-F:.]+\]):(\d+))/?(?:metrics|status|healthz|readyz)?")
_OWN_LABELS = ("phase", "kind", "reason", "state", "role", "mode", "name", "run_id")  # the others are the scrape's
_SERIES = '__name__=~"up|rookery_.+|process_(resident_memory_bytes|cpu_seconds_total|start_time_seconds|open_fds|max_fds)"'
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def parse_metrics(text: str) -> Samples:
    """Parse the Prometheus text format. Of several labels the id of the run counts, or else the first one."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    labelled = ((sample.labels.get("run_id", next(iter(sample.labels.values()), "")), sample) for sample in samples)
    return {(sample.name, label): sample.value for label, sample in labelled}


def get(url: str, *, timeout: Seconds = PAGE_TIMEOUT, limit: int = MAX_PAGE_BYTES, proxies: bool = False) -> tuple[int, str]:
    """Return HTTP status and text of a page.

    Through the `proxies` of the environment (`http_proxy`) only where asked for: they do not reach services on loopback.
    Raises OSError or HTTPException without an answer, ValueError for a page that is too long or is not text.
    """
    try:
        open_url = urllib.request.urlopen if proxies else _DIRECT.open
        answer = open_url(url, timeout=timeout)  # callers pass http and https only
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        body = answer.read(limit + 1)
        if len(body) > limit:
            raise ValueError(f"more than {limit} bytes at {url}")
        return answer.status, body.decode()


class Services:
    """Services that are scraped directly, all at once."""

    keeps_history = False  # earlier scrapes cannot be read
    window: Seconds = 10.0  # the default time to measure over

    def __init__(self, urls: Mapping[str, str], *, title: str, run_ids: Mapping[str, str] = MappingProxyType({})) -> None:
        """Scrape the services at `urls`, by name; one that `run_ids` has must be of that run."""
        self.title, self._urls, self._run_ids = title, dict(urls), run_ids

    def read(self, _: Seconds = 0.0) -> Scrape:
        """Return a sample of each service, within `DEADLINE` even if one hangs."""
        answers: dict[str, ServiceSample] = {}

        def ask(name: str, url: str) -> None:
            answers[name] = _ask(url)

        threads = [threading.Thread(target=ask, args=item, daemon=True) for item in self._urls.items()]
        for thread in threads:
            thread.start()
        until = time.monotonic() + DEADLINE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        late = ServiceSample(at=time.time(), unreachable=f"no answer within {DEADLINE:g} s")
        ours = {name: _of_run(self._run_ids.get(name, ""), answers.get(name, late)) for name in self._urls}
        return {name: _with_role(name, sample) for name, sample in ours.items()}


def _of_run(run_id: str, sample: ServiceSample) -> ServiceSample:
    """Return the sample; an unreachable one where the service is of another run than `run_id`, and both are known."""
    other = next(iter(by_label(sample.samples, RUN_INFO.name)), "")
    if not run_id or other in {"", run_id[:LABEL_CHARACTERS]}:
        return sample
    return ServiceSample(at=sample.at, unreachable=f"another run answers, {other} instead of {run_id}")


def _with_role(name: str, sample: ServiceSample) -> ServiceSample:
    """Return the sample with the role in the name of its service, such as actor-0, where the service itself did not state one."""
    named = re.split(r"\W", name)[0]
    return sample if sample.role or named not in ROLES else replace(sample, role=named)


def _ask(url: str) -> ServiceSample:
    now = time.time()
    try:
        code, page = get(f"{url}/metrics", timeout=TIMEOUT)
        received = time.monotonic()
        samples = parse_metrics(page) if code == http.client.OK else {}
        _, health = get(f"{url}/healthz", timeout=TIMEOUT)
    except ValueError:
        return ServiceSample(at=now, unreachable="it is no rookery service", foreign=True)
    except (OSError, http.client.HTTPException) as error:
        return ServiceSample(at=now, unreachable=_reason(error))
    if not (role := role_of(samples)):
        return ServiceSample(at=now, unreachable=f"it is no rookery service (HTTP {code})", foreign=True)
    answer = health.strip()
    unhealthy = "" if answer == "ok" else answer
    return ServiceSample(at=now, received=received, role=role, samples=samples, unhealthy=unhealthy)


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return (getattr(inner, "strerror", None) or str(inner) or type(inner).__name__).lower()


class Prometheus:
    """A Prometheus that scrapes the services, with its history."""

    keeps_history = True
    window: Seconds = 60.0  # several scrapes at the usual intervals

    def __init__(self, url: str, *, namespace: str | None = None) -> None:
        self.title, self._url = url, url.rstrip("/")
        self._narrowed = f', namespace="{namespace}"' if namespace else ""

    def read(self, ago: Seconds = 0.0) -> Scrape:
        """Return the last scrapes before that moment.

        Raises `ConfigError` where the address is no Prometheus, `ResourceError` where it does not answer.
        """
        at = time.time() - ago
        samples: defaultdict[_Target, dict[tuple[str, str], float]] = defaultdict(dict)
        down: dict[_Target, str] = {}  # role by target
        for labels, value in self._query(f"{{{_SERIES}{self._narrowed}}}", at):
            if labels.get("__name__") == "up":
                if value == 0 and (role := JOBS.get(labels.get("job", ""))):
                    down[_target(labels)] = role
                continue
            own = next((labels[name] for name in _OWN_LABELS if name in labels), "")
            samples[_target(labels)][labels.get("__name__", ""), own] = value
        about = f'timestamp({{__name__="rookery_build_info"{self._narrowed}}})'
        scraped = {_target(labels): value for labels, value in self._query(about, at)}
        name = _own_name if self._narrowed else _full_name
        unreachable = {
            name(target): ServiceSample(at=at, role=role, unreachable="Prometheus could not scrape it")
            for target, role in down.items()
        }
        return unreachable | {
            name(target): ServiceSample(at=moment, role=role, samples=found, unhealthy=_overdue(found))
            for target, moment in scraped.items()
            if (role := role_of(found := samples[target]))
        }

    def _query(self, query: str, at: Seconds) -> Iterable[tuple[Mapping[str, str], float]]:
        url = f"{self._url}/api/v1/query?{urlencode({'query': query, 'time': f'{at:.3f}'})}"
        try:
            _, page = get(url, timeout=PROMETHEUS_TIMEOUT, limit=PROMETHEUS_LIMIT, proxies=True)
            return [(one["metric"], float(one["value"][1])) for one in json.loads(page)["data"]["result"]]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise _no_prometheus(self._url) from error
        except (OSError, http.client.HTTPException) as error:
            fix = "check the address, and that it runs"
            raise ResourceError("the Prometheus does not answer", found=f"{_reason(error)} at {self._url}", fix=fix) from error


Source: TypeAlias = Services | Prometheus


def _overdue(samples: Samples) -> str:
    """Return what /healthz, which Prometheus does not ask, reports of a loop that hangs; "" of one that turns."""
    overdue = samples.get((LOOP_OVERDUE.name, ""), 0.0)
    return f"its loop should have ticked {overdue:,.0f} s ago" if overdue > 0 else ""


class _Target(NamedTuple):
    """A process; "" for what is not known."""

    namespace: str
    pod: str
    instance: str  # its address


def _target(labels: Mapping[str, str]) -> _Target:
    return _Target(*(labels.get(name, "") for name in _Target._fields))


def _own_name(target: _Target) -> str:
    return target.pod or target.instance


def _full_name(target: _Target) -> str:
    """Return the name of a target with its namespace, if any: pods of two may have one name."""
    return f"{target.namespace}/{_own_name(target)}" if target.namespace else _own_name(target)


def _no_prometheus(url: str) -> ConfigError:
    return ConfigError("no Prometheus answers there", found=url, wanted="its base address, such as http://127.0.0.1:9090")


def open_source(named: Sequence[str], *, prometheus: str | None, namespace: str | None, folder: Path) -> Source:
    """Return the deployment that a command line names; without names the newest run under `folder` that answers.

    Raises `ConfigError` or `ResourceError`, also where no service answers, or another HTTP server does.
    """
    if prometheus is not None:
        if named:
            raise ConfigError("two places to read from", found=f"{named[0]} and --prometheus", wanted="one of them")
        return _open_prometheus(prometheus, namespace)
    if namespace is not None:
        raise ConfigError("--namespace narrows a Prometheus", found="none", wanted="--prometheus URL")
    return _named(named or [str(_newest(folder, "here"))])


def _named(named: Sequence[str]) -> Services:
    """Return the services of run directories, of the newest run in other folders, and of addresses. Raises as `open_source`."""
    urls: dict[str, str] = {}
    run_ids: dict[str, str] = {}
    titles: list[str] = []
    for word in named:
        folder = Path(word)
        if folder.is_dir():
            directory = RunDirectory(next(run_folders(folder, depth=0), None) or _newest(folder, "there"))
            found = _addresses(directory)
            with suppress(OSError):
                run_ids |= dict.fromkeys(found, str(run_id(directory.config.read_bytes()) or ""))
            titles.append(str(directory.path))
        else:
            found = {_address(word): f"http://{_address(word)}"}
            titles.append(word)
        if taken := {name for name in urls.keys() & found.keys() if urls[name] != found[name]}:  # names are those of one run
            raise ConfigError("two runs", found=f"{', '.join(sorted(taken))} in {' and '.join(titles)}", wanted="one of them")
        urls |= found
    return _answering(Services(urls, title=", ".join(titles), run_ids=run_ids))


def _open_prometheus(url: str, namespace: str | None) -> Prometheus:
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        raise ConfigError("no such namespace", found=repr(namespace), wanted="a name of Kubernetes, such as rookery")
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise _no_prometheus(url)
    source = Prometheus(url, namespace=namespace)
    if not source.read():
        fix = "let it scrape the services: see docs/metrics.md"
        raise ConfigError("this Prometheus has no metrics of rookery", found=url, wanted="rookery_build_info", fix=fix)
    return source


def _address(word: str) -> str:
    found = _ADDRESS.fullmatch(word)
    if word.startswith("tcp://"):
        fix = "that is the port of experience: give the port of its metrics"
        raise ConfigError("not an HTTP address", found=word, wanted="host:port of metrics.host and metrics.port", fix=fix)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise ConfigError("no such target", found=repr(word), wanted=TARGETS)
    return found[1]


def _addresses(directory: RunDirectory) -> dict[str, str]:
    try:
        return dict(json.loads(directory.addresses.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        fix = "name the addresses of its services, if they were started one by one"
        raise ConfigError("no run is under way there", found=str(directory.path), wanted=TARGETS, fix=fix) from error


def _newest(folder: Path, where: str) -> Path:
    """Return the directory of the newest run in `folder` that answers, a member of a series too."""
    inside = (entry for entry in folder.glob("*/") if not entry.name.startswith("."))  # a config.yaml beside runs hides none
    runs = itertools.chain([folder], *(run_folders(entry, DEPTH - 1) for entry in inside))
    addresses = (RunDirectory(run).addresses for run in runs)
    started = {path.parent: path.stat().st_mtime for path in addresses if path.is_file()}
    found = f"none under {folder}/"
    for run in sorted(started, key=lambda run: started[run], reverse=True):
        try:
            _named([str(run)])
        except (ConfigError, ResourceError) as error:  # left behind by one that was killed, or it hangs; or it ends just now
            found = f"{run}, where no service answers ({error.found})"
        else:
            return run
    raise ConfigError(f"no run is under way {where}", found=found, wanted=TARGETS, fix="or give --prometheus URL")


def _answering(services: Services) -> Services:
    scrape = services.read()
    for name, sample in scrape.items():
        if sample.foreign:
            raise ConfigError("this is no rookery service", found=f"another HTTP server at {name}", wanted=TARGETS)
    if all(sample.unreachable for sample in scrape.values()):
        name, sample = next(iter(scrape.items()))
        raise ResourceError(
            "no service answers",
            found=f"{sample.unreachable} at {name}",
            wanted="a service that runs",
            fix="check the address; a run that has just begun takes up to half a minute",
        )
    return services
