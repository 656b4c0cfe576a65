"""HTTP pages of services: a request with a limit of time and size, and metrics as values."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from common.observability.deployment import Samples
from common.units import MIB, Seconds

TIMEOUT: Seconds = 0.5
MAX_PAGE_BYTES = 16 * MIB

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def parse_metrics(text: str) -> Samples:
    """Parse the Prometheus text format, without the buckets of histograms."""
    families = text_string_to_metric_families(text)
    samples = (sample for family in families for sample in family.samples if not sample.name.endswith("_bucket"))
    return {(sample.name, next(iter(sample.labels.values()), "")): sample.value for sample in samples}


def get(url: str, *, timeout: Seconds = TIMEOUT, limit: int = MAX_PAGE_BYTES, proxies: bool = False) -> tuple[int, str]:
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
