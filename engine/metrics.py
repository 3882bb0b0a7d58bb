"""The engine's statistics for Prometheus, in a registry of their own."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.output import EngineStats

_RESTORE = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0]
_TTFT = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
_INTER_TOKEN = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]


class Metrics:
    """An `engine.engine_loop.Observer` that Prometheus can read. Any thread may call it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "warmstate_requests",
            "Answers by how they ended",
            ["outcome"],
            registry=self.registry,
        )
        self._faults = Counter(
            "warmstate_engine_faults", "Steps that raised", registry=self.registry
        )
        self._restore = self._histogram("restore_seconds", "Restores of one step", _RESTORE)
        self._ttft = self._histogram("ttft_seconds", "From the queue to the first token", _TTFT)
        self._gap = self._histogram("inter_token_seconds", "Between two tokens", _INTER_TOKEN)

    def _histogram(self, name: str, text: str, buckets: list[float]) -> Histogram:
        return Histogram(f"warmstate_{name}", text, buckets=buckets, registry=self.registry)

    def watch(self, snapshot: Callable[[], EngineStats]) -> None:
        """Export what this returns at each scrape."""
        self.registry.register(_StatsCollector(snapshot))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_token(self, seconds: float) -> None:
        self._gap.observe(seconds)

    def restored(self, seconds: float) -> None:
        self._restore.observe(seconds)

    def ended(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def fault(self) -> None:
        self._faults.inc()


class _StatsCollector(Collector):
    """Reads a snapshot of the engine when Prometheus asks."""

    def __init__(self, snapshot: Callable[[], EngineStats]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not take a snapshot to know the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._snapshot()
        yield _counter("queries", "Requests whose prompt was computed", stats.queries)
        yield _counter("hits", "Queries that reused something", stats.hits)
        yield _counter("tokens_reused", "Prompt tokens from the cache", stats.tokens_reused)
        yield _counter("tokens_prefilled", "Prompt tokens computed", stats.tokens_prefilled)
        yield _counter(
            "tokens_prefilled_idle",
            "Tokens of answers prefilled in idle time",
            stats.tokens_prefilled_idle,
        )
        yield _counter("tokens_drafted", "Guesses of the draft head", stats.tokens_drafted)
        yield _counter("tokens_accepted", "Guesses that were right", stats.tokens_accepted)
        yield _counter("decodes_replayed", "Decode steps from a graph", stats.decodes_replayed)
        yield _counter("decodes_eager", "Decode steps launched op by op", stats.decodes_eager)
        yield _counter("cold_starts", "Restores that failed", stats.cold_starts)
        yield _counter("preemptions", "Requests that lost their place", stats.preemptions)
        yield _counters("misses", "Queries that reused nothing", "reason", stats.misses)
        yield _counters("saves_skipped", "States not saved", "reason", stats.saves_skipped)
        yield _gauges("slots", "State slots", _by_state(stats, "slots", "live checkpoint free"))
        yield _gauges("blocks", "K/V blocks", _by_state(stats, "blocks", "in_use cached free"))
        queue = _by_state(stats, "requests", "waiting running background")
        yield _gauges("requests", "Requests in the engine", queue)


def _by_state(stats: EngineStats, noun: str, states: str) -> dict[str, int]:
    return {state: getattr(stats, f"{noun}_{state}") for state in states.split()}


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"warmstate_{name}", text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"warmstate_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


def _gauges(name: str, text: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"warmstate_{name}", text, labels=["state"])
    for state, count in values.items():
        family.add_metric([state], count)
    return family
