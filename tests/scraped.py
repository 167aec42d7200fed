"""What a process shows of its metrics."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


async def scraped(port: int, name: str, **labels: str) -> float:
    """The sum of the series of ``slipstream_<name>`` that carry ``labels``; 0 if there is none."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    return sum(sample.value for family in text_string_to_metric_families(page) for sample in family.samples
               if sample.name == f"slipstream_{name}" and labels.items() <= sample.labels.items())
