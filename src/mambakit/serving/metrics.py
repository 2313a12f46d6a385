"""What the server counts, as Prometheus reads it."""

from __future__ import annotations

import bisect
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping

COUNTERS = {
    "requests": "Requests to the API, by path and status.",
    "prompt_tokens": "Tokens of prompts.",
    "cached_prompt_tokens": "Tokens of prompts that the prefix cache had read before.",
    "generated_tokens": "Tokens that were generated.",
    "prefix_cache_hits": "Prompts of which the prefix cache knew a beginning.",
    "prefix_cache_misses": "Prompts of which it knew none.",
    "cancelled_sequences": "Answers whose client went away.",
    "failed_sequences": "Answers that ended with a fault of the server.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "request_seconds": "From the arrival of a request to the end of its answer.",
}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters are added to from the server's and the engine's threads; gauges are asked for when they are read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, int]] = {name: {} for name in COUNTERS}
        self._observed: dict[str, list[int]] = {name: [0] * (len(BUCKETS) + 1) for name in HISTOGRAMS}
        self._sums: dict[str, float] = defaultdict(float)
        self.gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._counts[name][key] = self._counts[name].get(key, 0) + amount

    def observe(self, name: str, value: float) -> None:
        with self._lock:
            self._observed[name][bisect.bisect_left(BUCKETS, value)] += 1
            self._sums[name] += value

    def text(self) -> str:
        lines = []
        with self._lock:
            for name, about in COUNTERS.items():
                counts: Mapping[Labels, int] = self._counts[name]
                lines += _head(f"{name}_total", about, "counter")
                lines += [f"mambakit_{name}_total{_labels(key)} {count}" for key, count in sorted(counts.items())]
                if not counts and name != "requests":
                    lines.append(f"mambakit_{name}_total 0")
            for name, about in HISTOGRAMS.items():
                lines += _head(name, about, "histogram")
                total = 0
                for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._observed[name], strict=True):
                    total += count
                    lines.append(f'mambakit_{name}_bucket{{le="{bound}"}} {total}')
                lines += [f"mambakit_{name}_sum {self._sums[name]:.6f}", f"mambakit_{name}_count {total}"]
        for name, (about, read) in self.gauges.items():
            lines += [*_head(name, about, "gauge"), f"mambakit_{name} {read():g}"]
        return "\n".join(lines) + "\n"


def _head(name: str, about: str, kind: str) -> list[str]:
    return [f"# HELP mambakit_{name} {about}", f"# TYPE mambakit_{name} {kind}"]


def _labels(key: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in key) + "}" if key else ""
