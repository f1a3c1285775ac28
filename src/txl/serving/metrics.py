"""Prometheus metrics of a server, in a separate registry for each server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters, gauges and histograms of one server."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "txl_requests", "Requests answered, by route and status.", ["route", "status"], registry=registry
        )
        self.tokens_read = Counter("txl_tokens_read", "Tokens of prompts and appended text read.", registry=registry)
        self.tokens_generated = Counter("txl_tokens_generated", "Tokens drawn.", registry=registry)
        self.steps = Counter("txl_steps", "Decoding steps, of one token for every running text.", registry=registry)
        self.running = Gauge("txl_texts_running", "Texts that are being read or decoded now.", registry=registry)
        self.queued = Gauge("txl_texts_queued", "Texts that wait for a place in the engine.", registry=registry)
        self.streams = Gauge("txl_streams", "Streams that are kept.", registry=registry)
        self.stream_bytes = Gauge("txl_stream_bytes", "Bytes of the kept streams' memory.", registry=registry)
        self.first_token = Histogram(
            "txl_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "txl_request_seconds", "Duration of requests.", ["route"], buckets=_SECONDS, registry=registry
        )

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
