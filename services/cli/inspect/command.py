"""`rookery top`, `rookery doctor` and `rookery health`: their options and their help."""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.units import Seconds
from services.cli.parser import add_command

if TYPE_CHECKING:
    from common.config.sections import MetricsSettings
    from services.cli.inspect.scrape import Source

MAX_MEASUREMENT_SECONDS = 86_400.0
HEALTH_TIMEOUT: Seconds = 3.0
TARGETS = """\
TARGET is the directory of a run of `rookery train`, or the address of a service's metrics, host:port; give as many as there
are. Of a folder of runs, such as a series, it is the newest one in progress; without a TARGET that under runs/. With
--prometheus all that it scrapes is shown.

examples:
  rookery {0}
  rookery {0} runs/mine
  rookery {0} 10.0.0.7:9100 10.0.0.8:9100 10.0.0.9:9100
  rookery {0} --prometheus http://127.0.0.1:9090

"""
TOP_CODES = "exit code: 0 shown; 2 bad input, or no service answers.\n"
DOCTOR_CODES = "exit code: 0 healthy (a bottleneck is no fault); 1 something is broken; 2 bad input, or no service answers.\n"


def add(commands: Any) -> None:
    """Add the three."""
    top = _add_inspection(commands, "top", _top, "a live table of a running deployment", TOP_CODES)
    top.add_argument("--once", action="store_true", help="print one table, measured over two seconds, and exit")
    doctor = _add_inspection(commands, "doctor", _doctor, "the bottleneck and the faults of a running deployment", DOCTOR_CODES)
    help_seconds = "length of the measurement; default: 10, and 60 of a Prometheus' past"
    doctor.add_argument("--seconds", metavar="N", type=_seconds, help=help_seconds)
    health = add_command(
        commands,
        "health",
        _health,
        "the health of the service on this host: exit code 0 alive, 1 not",
        usage="rookery health [--ready] [metrics.host=HOST] [metrics.port=PORT]",
        takes_settings=True,
    )
    health.add_argument("--ready", action="store_true", help="ask if the service is ready for work instead of alive")


def _add_inspection(
    commands: Any, name: str, function: Callable[[argparse.Namespace], int], summary: str, codes: str
) -> argparse.ArgumentParser:
    usage = f"rookery {name} [TARGET ...] [options]"
    parser = add_command(
        commands, name, function, summary, usage=usage, epilog=TARGETS.format(name) + codes, max_names=sys.maxsize
    )
    parser.add_argument("--prometheus", metavar="URL", help="read from a Prometheus that scrapes the services")
    parser.add_argument("--namespace", metavar="NAME", help="one namespace of the runs that the Prometheus scrapes")
    return parser


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0.0 < (seconds := float(text)) <= MAX_MEASUREMENT_SECONDS:  # False for NaN
            return seconds
    raise argparse.ArgumentTypeError(f"found {text!r}, wanted seconds above 0, {MAX_MEASUREMENT_SECONDS:,.0f} at most")


def _top(options: argparse.Namespace) -> int:
    from services.cli.inspect.top import top  # noqa: PLC0415

    return top(_source(options), once=options.once, stdout=sys.stdout)


def _doctor(options: argparse.Namespace) -> int:
    from services.cli.inspect.doctor import doctor  # noqa: PLC0415

    return doctor(_source(options), seconds=options.seconds, stdout=sys.stdout)


def _source(options: argparse.Namespace) -> Source:
    from services.cli.inspect.scrape import open_source  # noqa: PLC0415

    return open_source(options.names, prometheus=options.prometheus, namespace=options.namespace, folder=Path("runs"))


def _health(options: argparse.Namespace) -> int:
    """Request /healthz or /readyz. Imports no torch, because an orchestrator may call it again and again."""
    from common.config.load import ENV_PREFIX, load_settings  # noqa: PLC0415

    prefix = f"{ENV_PREFIX}METRICS__"  # other variables may be invalid without the preset of the service
    environ = {name: text for name, text in os.environ.items() if name.startswith(prefix)}
    metrics = load_settings(preset=None, overrides=options.overrides, environ=environ).settings.metrics
    if metrics.port == 0:
        fix = f"set {prefix}PORT, or add metrics.port=9100"
        raise ConfigError("no port to ask", found="metrics.port 0", wanted="the port of the service", fix=fix)
    healthy, text = _request_health(metrics, "/readyz" if options.ready else "/healthz")
    print(" ".join(text.split()))
    return 0 if healthy else 1


def _request_health(metrics: MetricsSettings, path: str) -> tuple[bool, str]:
    from common.config.endpoint import connectable_host  # noqa: PLC0415

    host = connectable_host(metrics.host).strip("[]")
    connection = http.client.HTTPConnection(host, metrics.port, timeout=HEALTH_TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status == http.client.OK, answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return False, f"no answer at {host}:{metrics.port}{path}: {error or type(error).__name__}"
    finally:
        connection.close()
