"""Figures of a server for Prometheus, under its own names and, as aliases, under vLLM's; and of a cluster."""

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
OF_VLLM = frozenset(
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
"""Families that vLLM has too, by the same names, which dashboards ask for."""

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG = (0.005, 0.025, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)


class Metrics(Collector):
    """Counters of a server with one engine process. One thread counts; any thread may read.

    Args:
      model: label of all samples.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._llms: dict[str, LLM] = {}
        self._last: dict[tuple[QueuedRequest, int, int], float] = {}
        self.running = self._gauge("num_requests_running", "Rows that are in the cache.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that no step has touched yet.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts of requests that have started.")
        self.generated = self._counter("generation_tokens", "Tokens that were generated.")
        self.rejected = self._counter("admission_rejections", "Requests refused because the queue was full.")
        self.cached = self._counter("prefix_cache_hits", "Tokens of prompts that were taken over from earlier ones.")
        self.queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked for.")
        self.drafts = self._counter("spec_decode_num_drafts", "Steps of rows that verified a draft.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens that were verified.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._by_place = self._labelled(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by their place in the draft.", "position"
        )
        self._drafted_by = self._labelled("spec_decode_drafter_draft_tokens", "Verified tokens by drafter.", "drafter")
        self._accepted_by = self._labelled(
            "spec_decode_drafter_accepted_tokens", "Accepted tokens by drafter.", "drafter"
        )
        self._ends = self._labelled("request_success", "Texts that have ended, by reason.", "finished_reason")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SHORT)
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between steps that brought a text tokens.", SHORT
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", LONG)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", LONG)

    def watch(self, llms: Sequence[LLM]) -> None:
        """Include figures of these engines, by method; they are read with every page."""
        for llm in llms:
            title = llm.speculative_config.title
            self._llms[f"{title} {len(self._llms)}" if title in self._llms else title] = llm

    def page(self) -> bytes:
        """All samples in the text format of Prometheus."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """All families, and those that vLLM has again under its prefix."""
        families = [*self.registry.collect(), *self._engines()]
        yield from families
        for family in families:
            if family.name in OF_VLLM:
                alias = copy(family)
                alias.name = family.name.replace(OWN, ALIAS, 1)
                alias.samples = [sample._replace(name=sample.name.replace(OWN, ALIAS, 1)) for sample in family.samples]
                yield alias

    def _engines(self) -> Iterator[Metric]:
        found = {title: _figures(llm) for title, llm in self._llms.items()}
        for kind, name, text in OF_ENGINES:
            family = kind(OWN + name, text, labels=["model_name", "method"])
            for title, figures in found.items():
                if (value := figures.get(name)) is not None:
                    family.add_metric([self._model, title], value)
            yield family

    # -- by the thread of the engine -------------------------------------------------------------------------------

    def load(self, num_running: int, num_waiting: int) -> None:
        """Rows that run and requests that wait at present."""
        self.running.set(num_running)
        self.waiting.set(num_waiting)

    def started(self, ticket: QueuedRequest) -> None:
        """A step has touched a request."""
        self._queue.observe(perf_counter() - ticket.arrived)
        self.prompt_tokens.inc(ticket.num_prompt_tokens)
        self.queries.inc(ticket.num_prompt_tokens)

    def emitted(self, ticket: QueuedRequest, news: Sequence[StreamOutput]) -> None:
        """Steps have brought a request tokens."""
        now = perf_counter()
        for delta in news:
            row = ticket, delta.prompt_index, delta.index
            before = self._last.get(row)
            if before is None:
                self._first.observe(now - ticket.arrived)
            elif delta.token_ids:
                self._between.observe(now - before)
            self.generated.inc(len(delta.token_ids))
            self._last[row] = now
            if delta.finish_reason is not None:
                del self._last[row]

    def ended(self, ticket: QueuedRequest, has_failed: bool) -> None:
        """A request is over."""
        assert ticket.stream is not None
        for row in [row for row in self._last if row[0] is ticket]:
            del self._last[row]
        self._whole.observe(perf_counter() - ticket.arrived)
        for reason in ticket.stream.finish_reasons:
            self._ends.labels(self._model, "error" if has_failed else str(reason)).inc()
        stats = ticket.stream.stats
        self.cached.inc(ticket.stream.num_cached_tokens)
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
OF_ENGINES: tuple[tuple[Any, str, str], ...] = (
    (RATIO, "governor_estimated_speedup", "Speed so far by that of plain decoding, by estimate."),
    (COUNT, "governor_steps", "Steps that a governor has seen."),
    (COUNT, "governor_drafted_steps", "Of these, steps that verified a draft."),
    (COUNT, "governor_seconds", "Time of these steps."),
    (COUNT, "governor_plain_seconds", "Time that plain decoding would have taken for their tokens, by estimate."),
    (RATIO, "kv_cache_bytes", "Keys and values that are allocated, drafters' included."),
    (RATIO, "kv_cache_planned_bytes", "Those that may be allocated (max_kv_bytes)."),
    (RATIO, "kv_cache_usage_perc", "Share of the plan that rows take; 1 is all of it."),
    (RATIO, "prefix_cache_bytes", "Keys and values left for later prompts, all methods together."),
    (COUNT, "num_preemptions", "Rows that left the cache for a while."),
)
"""Families of estimates of governors and of memory: kind, name and text."""


def _figures(llm: LLM) -> dict[str, float | None]:
    """Values of `OF_ENGINES` for one engine, by name; None or missing where there is none."""
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
    """Counters of an ingress, together with the pages of its replicas.

    Args:
      model: label of the ingress's own samples.
      pages: returns the newest page of every replica, by the replica's name.
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
        """All samples in the text format of Prometheus."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """The ingress's own families, and those of all replicas joined, each sample with the name of its replica."""
        yield from self._registry.collect()
        families: dict[str, Metric] = {}
        for replica, page in sorted(self._pages().items()):
            for family in text_string_to_metric_families(page.decode()):
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, REPLICA: replica}))
        yield from families.values()
