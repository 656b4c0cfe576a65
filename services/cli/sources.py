"""Where `rookery top` and `rookery doctor` read their figures: from the services themselves, or from a Prometheus.

A question has a deadline, and no answer is an answer: a service that hangs must not hold up the one who asks why.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.error
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

from common.errors import ConfigError, ResourceError
from common.runtime.run_directory import RunDirectory
from common.units import MIB, Seconds
from services.cli.readings import Moment, Reading, role_of
from services.cli.status import get, parse_metrics

DEADLINE: Seconds = 5.0  # for all that one service is asked
TIMEOUT: Seconds = 2.0  # of one step of one question
PROMETHEUS_TIMEOUT: Seconds = 10.0
PROMETHEUS_LIMIT = 64 * MIB
TARGETS = "a run directory, or addresses of services such as 127.0.0.1:9100 (metrics.host, metrics.port)"

_ADDRESS = re.compile(r"(?:http://)?((?:[^/\s:@?#\[\]]+|\[[0-9a-fA-F:.]+\]):(\d+))/?(?:metrics|status|healthz|readyz)?")
_OWN_LABELS = ("phase", "kind", "reason", "state", "role", "mode", "name")  # the others are the scrape's
_SERIES = '__name__=~"rookery_.+|process_(resident_memory_bytes|cpu_seconds_total|start_time_seconds)", le=""'
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Source(Protocol):
    """A deployment that can be asked how it is."""

    title: str
    remembers: bool  # whether it can also say how it was
    window: Seconds  # over which to measure, where nobody says

    def read(self, ago: Seconds = 0.0) -> Moment:
        """All services as they are, or, where it remembers, as they were `ago` seconds ago."""


class Services:
    """Services that answer for themselves, all asked at once."""

    remembers = False
    window: Seconds = 10.0

    def __init__(self, urls: Mapping[str, str], *, title: str) -> None:
        """`urls` by the name that each shall go by."""
        self.title, self._urls = title, dict(urls)

    def read(self, _: Seconds = 0.0) -> Moment:
        """As they are now; within `DEADLINE`, whoever hangs."""
        answers: dict[str, Reading] = {}

        def ask(name: str, url: str) -> None:
            answers[name] = _ask(url)

        threads = [threading.Thread(target=ask, args=item, daemon=True) for item in self._urls.items()]
        for thread in threads:
            thread.start()
        until = time.monotonic() + DEADLINE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        late = Reading(at=time.time(), silence=f"no answer within {DEADLINE:g} s")
        return {name: answers.get(name, late) for name in self._urls}


def _ask(url: str) -> Reading:
    now = time.time()
    try:
        code, page = get(f"{url}/metrics", timeout=TIMEOUT)
        samples = parse_metrics(page) if code == http.client.OK else {}
        _, health = get(f"{url}/healthz", timeout=TIMEOUT)
    except ValueError:
        return Reading(at=now, silence="it is no rookery service", stranger=True)
    except (OSError, http.client.HTTPException) as error:
        return Reading(at=now, silence=_reason(error))
    if not (role := role_of(samples)):
        return Reading(at=now, silence=f"it is no rookery service (HTTP {code})", stranger=True)
    complaint = health.strip()
    return Reading(at=now, role=role, samples=samples, complaint="" if complaint == "ok" else complaint)


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return (getattr(inner, "strerror", None) or str(inner) or type(inner).__name__).lower()


class Prometheus:
    """A Prometheus that scrapes the services. It answers for any moment that it has kept."""

    remembers = True
    window: Seconds = 60.0  # several scrapes, as far apart as people make them

    def __init__(self, url: str, *, namespace: str | None = None) -> None:
        """`url` is where its web page is; `namespace` narrows it to one run of a cluster."""
        self.title, self._url = url, url.rstrip("/")
        self._narrowed = f', namespace="{namespace}"' if namespace else ""

    def read(self, ago: Seconds = 0.0) -> Moment:
        """What the last scrapes before that moment saw. Raises `ConfigError` or `ResourceError` where it is no help."""
        at = time.time() - ago
        samples: defaultdict[tuple[str, str], dict[tuple[str, str], float]] = defaultdict(dict)
        for labels, value in self._query(f"{{{_SERIES}{self._narrowed}}}", at):
            own = next((labels[name] for name in _OWN_LABELS if name in labels), "")
            samples[_target(labels)][labels.get("__name__", ""), own] = value
        about = f'timestamp({{__name__="rookery_build_info"{self._narrowed}}})'
        scraped = {_target(labels): value for labels, value in self._query(about, at)}
        return {
            _name(target): Reading(at=moment, role=role_of(samples[target]), samples=samples[target])
            for target, moment in scraped.items()
            if role_of(samples[target])
        }

    def _query(self, query: str, at: Seconds) -> Iterable[tuple[Mapping[str, str], float]]:
        url = f"{self._url}/api/v1/query?{urlencode({'query': query, 'time': f'{at:.3f}'})}"
        try:
            _, page = get(url, timeout=PROMETHEUS_TIMEOUT, limit=PROMETHEUS_LIMIT)
            return [(one["metric"], float(one["value"][1])) for one in json.loads(page)["data"]["result"]]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise _no_prometheus(self._url) from error
        except (OSError, http.client.HTTPException) as error:
            fix = "check the address, and that it runs"
            raise ResourceError("the Prometheus does not answer", found=f"{_reason(error)} at {self._url}", fix=fix) from error


def _target(labels: Mapping[str, str]) -> tuple[str, str]:
    """Which process: in a cluster the pod says more than its address."""
    return labels.get("pod", ""), labels.get("instance", "")


def _name(target: tuple[str, str]) -> str:
    pod, instance = target
    return pod or instance


def _no_prometheus(url: str) -> ConfigError:
    return ConfigError("no Prometheus answers there", found=url, wanted="its base address, such as http://127.0.0.1:9090")


def open_source(words: Sequence[str], *, prometheus: str | None, namespace: str | None, folder: Path) -> Source:
    """What the command line means; nothing named: the newest run under `folder` that is under way.

    Raises `ConfigError` or `ResourceError`, also where nobody answers or somebody else does.
    """
    if prometheus is not None:
        if words:
            raise ConfigError("two places to read from", found=f"{words[0]} and --prometheus", wanted="one of them")
        if namespace is not None and not _NAMESPACE.fullmatch(namespace):
            raise ConfigError("no such namespace", found=repr(namespace), wanted="a name of Kubernetes, such as rookery")
        return _with_metrics(Prometheus(_base(prometheus), namespace=namespace))
    if namespace is not None:
        raise ConfigError("--namespace narrows a Prometheus", found="none", wanted="--prometheus URL")
    if not words:
        return _newest(folder)
    urls: dict[str, str] = {}
    for word in words:
        urls |= _addresses(RunDirectory(Path(word))) if Path(word).is_dir() else {_address(word): f"http://{_address(word)}"}
    return _answering(Services(urls, title=", ".join(words)))


def _base(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise _no_prometheus(url)
    return url


def _address(word: str) -> str:
    found = _ADDRESS.fullmatch(word)
    if word.startswith("tcp://"):
        fix = "that is where peers connect: give the port of its metrics"
        raise ConfigError("not an HTTP address", found=word, wanted="host:port of metrics.host and metrics.port", fix=fix)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise ConfigError("no such target", found=repr(word), wanted=TARGETS)
    return found[1]


def _addresses(directory: RunDirectory) -> dict[str, str]:
    """Where the services of a run answer that `rookery train` runs now."""
    try:
        return dict(json.loads(directory.addresses.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        fix = "name the addresses of its services, if they were started one by one"
        raise ConfigError("no run is under way there", found=str(directory.path), wanted=TARGETS, fix=fix) from error


def _newest(folder: Path) -> Source:
    """The run begun last of those that answer."""
    runs = sorted(folder.glob(f"*/{RunDirectory(Path()).addresses.name}"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = f"none under {folder}/"
    for path in runs:
        try:
            return _answering(Services(_addresses(RunDirectory(path.parent)), title=str(path.parent)))
        except ResourceError as error:  # left behind by one that was killed, or it hangs
            found = f"{path.parent}, where nobody answers ({error.found})"
    raise ConfigError("no run is under way here", found=found, wanted=TARGETS, fix="or give --prometheus URL")


def _answering(services: Services) -> Services:
    moment = services.read()
    for name, reading in moment.items():
        if reading.stranger:
            raise ConfigError("this is no rookery service", found=f"another HTTP server at {name}", wanted=TARGETS)
    if all(reading.silence for reading in moment.values()):
        name, reading = next(iter(moment.items()))
        raise ResourceError(
            "nobody answers",
            found=f"{reading.silence} at {name}",
            wanted="a service that runs",
            fix="check the address; a run that has just begun takes up to half a minute",
        )
    return services


def _with_metrics(source: Prometheus) -> Prometheus:
    if not source.read():
        fix = "let it scrape the services: see docs/metrics.md"
        raise ConfigError("this Prometheus has no metrics of rookery", found=source.title, wanted="rookery_build_info", fix=fix)
    return source
