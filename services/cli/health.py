"""`rookery health`: asks the service of this host how it is. No torch: a container runtime calls it again and again."""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence

from common.errors import ConfigError
from common.runtime import config
from common.runtime.config import ENV_PREFIX
from common.runtime.tree import MetricsSettings
from common.units import Seconds
from services.cli.ports import reachable

TIMEOUT: Seconds = 3.0
OURS = f"{ENV_PREFIX}METRICS__"  # other variables are the service's to judge, and mean nothing without its preset


def health(*, ready: bool, overrides: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, str]:
    """Whether the service on `metrics.port` is alive, or `ready` for work, and its own sentence on that."""
    about = {name: text for name, text in environ.items() if name.startswith(OURS)}
    return ask(config.load(preset=None, overrides=overrides, environ=about).settings.metrics, "/readyz" if ready else "/healthz")


def ask(metrics: MetricsSettings, path: str) -> tuple[bool, str]:
    """What the service answers. Raises `ConfigError` where nobody can know its port."""
    if metrics.port == 0:
        fix = f"set {OURS}PORT, or add metrics.port=9100"
        raise ConfigError("no port to ask", found="metrics.port 0", wanted="the port of the service", fix=fix)
    host = reachable(metrics.host).strip("[]")
    connection = http.client.HTTPConnection(host, metrics.port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status == http.client.OK, _one_line(answer.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        return False, _one_line(f"no answer at {host}:{metrics.port}{path}: {error or type(error).__name__}")
    finally:
        connection.close()


def _one_line(text: str) -> str:
    return " ".join(text.split())
