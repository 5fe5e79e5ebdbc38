"""Prometheus metrics of a server, under foredraft's names and as aliases under vLLM's, and of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from foredraft.engine.frontend import StreamOutput
from foredraft.llm import LLM
from foredraft.serve.queued_request import QueuedRequest

OWN, ALIAS = "foredraft:", "vllm:"
VLLM_FAMILIES = frozenset(
    f"{OWN}{name}"
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    )
)
"""Metric families that vLLM has under the same names. They are exported again with vLLM's prefix for its dashboards."""

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.005, 0.025, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)


class Metrics(Collector):
    """Metrics of a server with one engine process. One thread updates them; any thread may read them.

    Args:
      model: value of the label ``model_name`` of all samples.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._llms: dict[str, LLM] = {}
        self.num_generated = 0  # read by the log of throughput
        self._last: dict[tuple[QueuedRequest, int, int], float] = {}
        self.running = self._gauge("num_requests_running", "Rows in the cache.")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting for their first step.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have started.")
        self.generated = self._counter("generation_tokens", "Generated tokens.")
        self.rejected = self._counter("admission_rejections", "Requests refused because the queue was full.")
        self.cached = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts verified, one per row and step.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._by_place = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position in the draft.", "position"
        )
        self._drafted_by = self._labelled(
            "spec_decode_drafter_draft_tokens", "Verified draft tokens by drafter.", "drafter"
        )
        self._accepted_by = self._labelled(
            "spec_decode_drafter_accepted_tokens", "Accepted draft tokens by drafter.", "drafter"
        )
        self._ends = self._labelled("request_success", "Finished rows by finish reason.", "finished_reason")
        self._first = self._histogram("time_to_first_token_seconds", "Time from arrival to the first token.", SHORT)
        self._between = self._histogram(
            "inter_token_latency_seconds", "Time between two steps that emitted tokens of a row.", SHORT
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end of the request.", LONG
        )
        self._queue = self._histogram("request_queue_time_seconds", "Time from arrival to the first step.", LONG)

    def watch(self, llms: Sequence[LLM]) -> None:
        """Include the metrics of these engines, labelled by method; they are read on every scrape."""
        for llm in llms:
            title = llm.speculative_config.title
            self._llms[f"{title} {len(self._llms)}" if title in self._llms else title] = llm

    def page(self) -> bytes:
        """All samples in the Prometheus text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all families. Families that vLLM has as well are yielded a second time under vLLM's prefix."""
        families = [*self.registry.collect(), *self._engines()]
        yield from families
        for family in families:
            if family.name in VLLM_FAMILIES:
                alias = copy(family)
                alias.name = family.name.replace(OWN, ALIAS, 1)
                alias.samples = [sample._replace(name=sample.name.replace(OWN, ALIAS, 1)) for sample in family.samples]
                yield alias

    def _engines(self) -> Iterator[Metric]:
        found = {title: _figures(llm) for title, llm in self._llms.items()}
        for kind, name, text in ENGINE_FAMILIES:
            family = kind(OWN + name, text, labels=["model_name", "method"])
            for title, figures in found.items():
                if (value := figures.get(name)) is not None:
                    family.add_metric([self._model, title], value)
            yield family

    # -- called in the engine thread -------------------------------------------------------------------------------

    def load(self, num_running: int, num_waiting: int) -> None:
        """Set the numbers of running rows and waiting requests."""
        self.running.set(num_running)
        self.waiting.set(num_waiting)

    def started(self, queued: QueuedRequest) -> None:
        """Count a request whose first step has run."""
        self._queue.observe(perf_counter() - queued.arrived)
        self.prompt_tokens.inc(queued.num_prompt_tokens)
        self.queries.inc(queued.num_prompt_tokens)

    def emitted(self, queued: QueuedRequest, news: Sequence[StreamOutput]) -> None:
        """Count the tokens of a request and record its latencies."""
        now = perf_counter()
        for delta in news:
            row = queued, delta.prompt_index, delta.index
            before = self._last.get(row)
            if before is None:
                self._first.observe(now - queued.arrived)
            elif delta.token_ids:
                self._between.observe(now - before)
            self.generated.inc(len(delta.token_ids))
            self.num_generated += len(delta.token_ids)
            self._last[row] = now
            if delta.finish_reason is not None:
                del self._last[row]

    def ended(self, queued: QueuedRequest, has_failed: bool) -> None:
        """Count a finished request and its speculation statistics."""
        assert queued.stream is not None
        for row in [row for row in self._last if row[0] is queued]:
            del self._last[row]
        self._whole.observe(perf_counter() - queued.arrived)
        for reason in queued.stream.finish_reasons:
            self._ends.labels(self._model, "error" if has_failed else str(reason)).inc()
        stats = queued.stream.stats
        self.cached.inc(queued.stream.num_cached_tokens)
        self.drafts.inc(stats.num_spec_steps)
        self.drafted.inc(stats.num_draft_tokens)
        self.accepted.inc(stats.num_accepted_draft_tokens)
        for length, count in stats.acceptance_histogram.items():
            for place in range(length):
                self._by_place.labels(self._model, str(place)).inc(count)
        for name, count in stats.drafted_by.items():
            self._drafted_by.labels(self._model, name).inc(count)
            self._accepted_by.labels(self._model, name).inc(stats.accepted_by[name])

    # -- families --------------------------------------------------------------------------------------------------

    def _gauge(self, name: str, text: str) -> Any:
        return Gauge(OWN + name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Any:
        return self._labelled(name, text).labels(self._model)

    def _labelled(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(OWN + name, text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:
        family = Histogram(OWN + name, text, ["model_name"], buckets=buckets, registry=self.registry)
        return family.labels(self._model)


RATIO, COUNT = GaugeMetricFamily, CounterMetricFamily
ENGINE_FAMILIES: tuple[tuple[Any, str, str], ...] = (
    (RATIO, "governor_estimated_speedup", "Estimated speed so far relative to plain decoding."),
    (COUNT, "governor_steps", "Steps measured by the governor."),
    (COUNT, "governor_drafted_steps", "Steps measured by the governor that verified a draft."),
    (COUNT, "governor_seconds", "Time of the steps measured by the governor."),
    (COUNT, "governor_plain_seconds", "Estimated time of plain decoding for the tokens of these steps."),
    (RATIO, "kv_cache_bytes", "Allocated keys and values, drafters' included."),
    (RATIO, "kv_cache_planned_bytes", "Limit of the keys and values (max_kv_bytes)."),
    (RATIO, "kv_cache_usage_perc", "Fraction of the limit that rows use, from 0 to 1."),
    (RATIO, "prefix_cache_bytes", "Keys and values of cached prefixes, all methods together."),
    (COUNT, "num_preemptions", "Preemptions: rows that were removed from the cache and resumed later."),
)
"""Metric families for governor estimates and memory: kind, name and description."""


def _figures(llm: LLM) -> dict[str, float | None]:
    """Values of `ENGINE_FAMILIES` for one engine, by name; None or absent if unavailable."""
    totals, memory = llm.governed, llm.memory
    found: dict[str, float | None] = {
        "kv_cache_bytes": memory.allocated_bytes,
        "kv_cache_planned_bytes": memory.planned_bytes,
        "kv_cache_usage_perc": memory.planned_share,
        "prefix_cache_bytes": memory.prefix_bytes,
        "num_preemptions": llm.profile.num_preemptions,
    }
    if totals is not None:
        found |= {
            "governor_estimated_speedup": totals.speedup,
            "governor_steps": totals.num_steps,
            "governor_drafted_steps": totals.num_drafted,
            "governor_seconds": totals.seconds,
            "governor_plain_seconds": totals.plain_seconds,
        }
    return found


REPLICA = "replica"


class ClusterMetrics(Collector):
    """Metrics of an ingress, together with those of its replicas.

    Args:
      model: value of the label ``model_name`` of the ingress's own samples.
      pages: function that returns the newest metrics page of every replica, by replica name.
    """

    def __init__(self, model: str, pages: Callable[[], Mapping[str, bytes]] = dict) -> None:
        self._registry = CollectorRegistry()
        self._pages = pages
        label = ["model_name"]

        def counter(name: str, text: str) -> Any:
            return Counter(OWN + name, text, label, registry=self._registry).labels(model)

        self.rejected = counter("ingress_rejections", "Requests refused because too many were waiting for a replica.")
        self.failovers = counter("failovers", "Requests continued on another replica because theirs was lost.")
        pause = Histogram(
            OWN + "failover_pause_seconds",
            "Time from the last token of a lost replica to the first token of the next.",
            label,
            buckets=LONG,
            registry=self._registry,
        )
        self.pause = pause.labels(model)

    def page(self) -> bytes:
        """All samples in the Prometheus text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the ingress's own families and the merged families of all replicas, with a replica label on each
        sample."""
        yield from self._registry.collect()
        families: dict[str, Metric] = {}
        for replica, page in sorted(self._pages().items()):
            for family in text_string_to_metric_families(page.decode()):
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, REPLICA: replica}))
        yield from families.values()
