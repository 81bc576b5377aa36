"""The counters of a server, in the text form of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the histograms' buckets."""


class Histogram:
    """A histogram of durations, with the bounds `SECONDS`."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.sum += seconds
        place = next((i for i, bound in enumerate(SECONDS) if seconds <= bound), len(SECONDS))
        self.counts[place] += 1

    def lines(self, name: str) -> Iterator[str]:
        """The cumulative buckets, as lines."""
        total = 0
        for bound, count in zip([*map(str, SECONDS), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Counters of one server since its start."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Counts by route and status."""
        self.cancelled = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token, self.per_token, self.latency = Histogram(), Histogram(), Histogram()

    def text(self, gauges: Mapping[str, float]) -> str:
        """All metrics as text; `gauges` are current values by name."""
        return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: Mapping[str, float]) -> Iterator[str]:
        yield "# HELP penstock_requests_total Requests by route and status."
        yield "# TYPE penstock_requests_total counter"
        for (route, status), count in sorted(self.requests.items()):
            yield f'penstock_requests_total{{route="{route}",status="{status}"}} {count}'
        for name, about, value in (
            ("cancelled_total", "Requests whose client left before the end.", self.cancelled),
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "Tokens generated.", self.generated_tokens),
        ):
            yield f"# HELP penstock_{name} {about}"
            yield f"# TYPE penstock_{name} counter"
            yield f"penstock_{name} {value}"
        for name, about, histogram in (
            ("first_token_seconds", "From a request to its first token.", self.first_token),
            ("token_seconds", "Between two tokens, the mean of each request.", self.per_token),
            ("request_seconds", "From a request to its last token.", self.latency),
        ):
            yield f"# HELP penstock_{name} {about}"
            yield f"# TYPE penstock_{name} histogram"
            yield from histogram.lines(f"penstock_{name}")
        for name, number in gauges.items():
            yield f"# TYPE penstock_{name} gauge"
            yield f"penstock_{name} {number:g}"
