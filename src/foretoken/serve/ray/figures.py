"""Figures of a cluster on one page: those of every replica under a label of its own, and those of failover."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from foretoken.serve.metrics import LONG, OWN

REPLICA = "replica"


class ClusterMetrics:
    """What the ingress counts itself, and what replicas have counted.

    Args:
      model: label of everything.
      pages: the newest page of every replica, by its name.
    """

    def __init__(self, model: str, pages: Callable[[], Mapping[str, bytes]] = dict) -> None:
        self._registry = CollectorRegistry()
        self._pages = pages
        label = ["model_name"]

        def counter(name: str, text: str) -> Any:
            return Counter(OWN + name, text, label, registry=self._registry).labels(model)

        self.rejected = counter("ingress_rejections", "Requests refused because too many waited for a replica.")
        self.failovers = counter("failovers", "Requests that went on elsewhere because their replica was lost.")
        pause = Histogram(
            OWN + "failover_pause_seconds",
            "From the last token of a lost replica to the first of the next.",
            label,
            buckets=LONG,
            registry=self._registry,
        )
        self.pause = pause.labels(model)

    def page(self) -> bytes:
        """What Prometheus reads."""
        joined = CollectorRegistry()
        joined.register(_Families(self._registry, self._pages()))
        return generate_latest(joined)


class _Families:
    """Families of several pages in one, each sample with the name of its replica."""

    def __init__(self, own: CollectorRegistry, pages: Mapping[str, bytes]) -> None:
        self._own, self._pages = own, pages

    def collect(self) -> Iterator[Metric]:
        yield from self._own.collect()
        families: dict[str, Metric] = {}
        for replica, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page.decode()):
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, REPLICA: replica}))
        yield from families.values()
