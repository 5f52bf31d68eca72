"""Counters in the form that Prometheus reads. One registry for each app."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
REQUEST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
GAPS = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """Prometheus counters and histograms of one process of the service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "autoac_http_requests",
            "Answers by route, method and status.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "autoac_http_request_seconds",
            "Time to the head of an answer, by route.",
            ("route",),
            buckets=REQUEST_SECONDS,
            registry=self.registry,
        )
        self.errors = Counter(
            "autoac_errors", "Problem documents by type.", ("type",), registry=self.registry
        )
        self.cache = Counter(
            "autoac_solve_requests",
            "Requests for a solve: hit (a stored result), shared (an earlier job), miss.",
            ("kind", "cache"),
            registry=self.registry,
        )
        self.solve_seconds = Histogram(
            "autoac_solve_seconds",
            "Time that this process's runner took for a job, by how it ended.",
            ("kind", "ended"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.gap = Histogram(
            "autoac_plan_gap",
            "Proven gap of the policies that this process's runner made.",
            buckets=GAPS,
            registry=self.registry,
        )
        self.requeued = Counter(
            "autoac_jobs_requeued", "Jobs whose runner went away or stopped.", registry=self.registry
        )

    def text(self, jobs: Mapping[str, int], runners: int) -> bytes:
        """Return all metrics, with those from the database: jobs by state, and live runners."""
        shared = CollectorRegistry()
        shared.register(_Shared(jobs, runners))
        return generate_latest(self.registry) + generate_latest(shared)


class _Shared(Collector):
    """The metrics that all processes of a database share."""

    def __init__(self, jobs: Mapping[str, int], runners: int) -> None:
        self._jobs, self._runners = jobs, runners

    def collect(self) -> Iterator[GaugeMetricFamily]:
        jobs = GaugeMetricFamily("autoac_jobs", "Jobs in the database by state.", labels=["state"])
        for state, count in self._jobs.items():
            jobs.add_metric([state], count)
        yield jobs
        yield GaugeMetricFamily("autoac_runners", "Runners with a recent heartbeat.", value=self._runners)
