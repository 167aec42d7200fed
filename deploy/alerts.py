"""Prometheus alerts over the services' metrics, each with a runbook.

Rules:
1. Only ``SlipstreamMetricsAbsent`` fires when there is no data or no traffic.
2. Texts name the problem and who is affected; labels name the place, so that equal alerts are grouped.
3. Every alert has its page ``docs/runbooks/<name>.md`` and its test.

It knows nothing about who receives alerts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import yaml

HEAD = "# Printed from deploy/alerts.py by `make chart`. A rules file as Prometheus reads it; the chart wraps it.\n"
WHERE = "namespace, release, model"  # the chart's PodMonitor says whose pods they are; elsewhere all are one release's
EACH = f"{WHERE}, instance"  # one service: what each of many does once is not done often
REQUESTS = f'(sum by ({WHERE}) (rate(slipstream_requests_total{{service="router"}}[5m])) > 0)'
FAILING = f'sum by ({WHERE}) (rate(slipstream_requests_total{{service="router",code=~"5.."}}[5m])) / {REQUESTS}'
# Requests refused for a key's own quota do not count.
OVERLOADED = f'sum by ({WHERE}) (rate(slipstream_request_errors_total{{type="overloaded_error"}}[5m])) / {REQUESTS}'


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expression: str
    duration: str
    severity: Literal["critical", "warning"]
    summary: str
    description: str

    @property
    def annotations(self) -> dict[str, str]:
        return {"summary": self.summary, "description": self.description,
                "runbook_url": f"docs/runbooks/{self.name}.md"}


ALERTS = (
    Alert("SlipstreamNoReadyTarget", f"max by ({WHERE}) (slipstream_targets_ready) == 0", "2m", "critical",
          "No target can take requests", "Every new request is refused with HTTP 503."),
    Alert("SlipstreamErrorRatioCritical", FAILING + " > 0.2", "5m", "critical",
          "More than 20 % of all requests fail", "They end with HTTP 5xx, and clients see these errors."),
    Alert("SlipstreamErrorRatioHigh", FAILING + " > 0.05", "10m", "warning",
          "More than 5 % of all requests fail", "They end with HTTP 5xx, and clients see these errors."),
    Alert("SlipstreamShedding", OVERLOADED + " > 0.05", "10m", "warning",
          "More than 5 % of all requests are refused for lack of room", "Clients get HTTP 429. There is more load "
          "than the routers or targets can take."),
    Alert("SlipstreamFirstTokenSlow",
          f"histogram_quantile(0.95, sum by (le, {WHERE}) "
          "(rate(slipstream_time_to_first_token_seconds_bucket[10m]))) > 5", "10m", "warning",
          "5 % of requests wait more than 5 s for their first token", "Requests wait for room, or prompts are long."),
    Alert("SlipstreamRouterStalls",
          f"max by ({WHERE}) (sum by ({EACH}) (increase(slipstream_event_loop_lag_seconds_count[10m])) - "
          f'sum by ({EACH}) (increase(slipstream_event_loop_lag_seconds_bucket{{le="0.25"}}[10m]))) > 5', "5m",
          "warning", "A router blocks again and again", "Its event loop blocked more than five times in ten minutes, "
          "each time for more than 0.25 s. While it blocks, none of its streams gets a token."),
    Alert("SlipstreamPreempting", f"sum by ({WHERE}) (rate(slipstream_preemptions_total[10m])) > 0.1", "10m", "warning",
          "Targets run out of KV slots", "Running answers lose their KV slots to others, and their KV is computed "
          "again. No answer is lost, but all are slower."),
    Alert("SlipstreamDeviceFull", f"max by ({WHERE}) (slipstream_shedding_level) > 0", "5m", "warning",
          "A target's device runs out of memory again and again", "The target makes trees smaller, then leaves drafts "
          "out, then refuses new answers (HTTP 429). Running answers go on; they fail only if even the smallest step "
          "does not fit."),
    Alert("SlipstreamDraftDown",
          f"sum by ({WHERE}) (slipstream_drafts_connected) == 0 and sum by ({WHERE}) (slipstream_drafts_expected) > 0",
          "5m", "warning",
          "No draft is connected to any target", "Answers are correct, but slower: they are decoded without drafts."),
    Alert("SlipstreamFallbackSustained",
          f'max by ({WHERE}) (slipstream_mode{{scope="pool",mode="speculate"}}) == 0 '
          f"and sum by ({WHERE}) (slipstream_drafts_connected) > 0 "
          f'and sum by ({WHERE}) (rate(slipstream_generation_tokens_total{{service="router"}}[5m])) > 0', "15m",
          "warning", "Drafts are connected but not used", "For 15 minutes no router has used drafts: speculation would "
          "be slower. The drafts' devices are idle."),
    Alert("SlipstreamModeFlapping",
          f'max by ({WHERE}) (sum by ({EACH}) (increase(slipstream_mode_transitions_total{{scope="pool"}}[10m]))) > 6',
          "5m", "warning", "Routers switch often between speculation and plain decoding",
          "At this load speculation only just pays, or drafts come and go. Latency is uneven."),
    Alert("SlipstreamAcceptanceLow",
          f"sum by ({WHERE}) (rate(slipstream_accepted_tokens_total[10m])) / "
          f"(sum by ({WHERE}) (rate(slipstream_drafts_total[10m])) > 0.1) < 0.2", "15m", "warning",
          "Targets accept few draft tokens", "On average, five verifications accept fewer than one draft token."),
    Alert("SlipstreamInvalidGrowth",
          f"sum by ({WHERE}) (increase(slipstream_invalid_growths_total[10m])) > 0", "0m", "warning",
          "A draft sends invalid draft tokens", "Targets refuse them, and no answer is affected. The draft has another "
          "version, is broken, or is not the service that you installed."),
    Alert("SlipstreamCertificateExpiring",
          f"min by ({WHERE}) (slipstream_tls_certificate_expiry_seconds) - time() < 7 * 86400", "10m", "warning",
          "A TLS certificate expires within a week", "It was not renewed. Once it has expired, services refuse each "
          "other's new connections: first answers lose their drafts, then there are no answers."),
    Alert("SlipstreamMetricsAbsent",
          'absent(slipstream_build_info{service="router"}) or absent(slipstream_build_info{service="target"})', "5m",
          "critical", "No metrics from routers or from targets", "They are down, or Prometheus cannot scrape them. "
          "Alerts that need these metrics cannot fire."),
)


def rules_yaml() -> str:
    """The alerts as a Prometheus rules file (YAML) with one group."""
    rules = [{"alert": alert.name, "expr": alert.expression, "for": alert.duration,
              "labels": {"severity": alert.severity}, "annotations": alert.annotations} for alert in ALERTS]
    return HEAD + yaml.safe_dump({"groups": [{"name": "slipstream", "rules": rules}]}, sort_keys=False, width=120,
                                 allow_unicode=True)
