"""The third board: the connection between target and draft, and the effects of its failures."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Row, quantiles, rate, ratio, share

STEP = "slipstream_step_seconds"
ENDS = "slipstream_tls_certificate_expiry_seconds"
EMITTED = (f"({rate('slipstream_accepted_tokens_total', '$target')} + "
           f"{rate('slipstream_bonus_tokens_total', '$target')})")

EXCHANGE = Row("Exchange", (
    Panel("Where a step's time goes", "percentunit",
          ((share(rate(f"{STEP}_sum", "$target", "phase"), rate(f"{STEP}_sum", "$target")), "{{phase}}"),),
          stacked=True, maximum=1, text="draft_wait: for growth from the draft; verify: the forward; host: the rest."),
    Panel("Wait for drafts", "s", quantiles(STEP, '$target,phase="draft_wait"')),
    Panel("Verify", "s", quantiles(STEP, '$target,phase="verify"')),
    Panel("Bytes", "Bps", ((rate("slipstream_wire_bytes_total", "$target", "direction"), "{{direction}}"),),
          text="Between targets and drafts, as targets see it."),
    Panel("Bytes for a token", "bytes", ((ratio(rate("slipstream_wire_bytes_total", "$target"), EMITTED), "bytes"),),
          text="Both directions, for each token that was emitted."),
    Panel("Streams", "none", (("sum(slipstream_drafts_connected{$target})", "targets see"),
                              ("sum(slipstream_targets_connected{$draft})", "drafts see"),
                              ("sum(slipstream_drafts_expected{$target})", "there should be"))),
))

TROUBLE = Row("Trouble", (
    Panel("Drafts lost", "cps", ((rate("slipstream_drafter_lost_total", "$target", "reason"), "{{reason}}"),),
          text="Streams to drafts that broke. Answers went on without."),
    Panel("Answers moved to another draft", "cps", ((rate("slipstream_drafter_moves_total", "$target"), "moved"),),
          text="Their draft went or drained, and another one could take them."),
    Panel("Growth of no use", "cps", ((rate("slipstream_stale_growths_total", "$target"), "too late"),
                                      (rate("slipstream_invalid_growths_total", "$target"), "refused by targets"),
                                      (rate("slipstream_invalid_items_total", "$draft"), "refused by drafts"))),
    Panel("Sessions that drafts gave up", "cps",
          ((rate("slipstream_session_expirations_total", "$draft", "reason"), "{{reason}}"),)),
    Panel("Targets' breakers", "none", (("max by (peer) (slipstream_breaker_state{$router})", "{{peer}}"),), maximum=2,
          text="0 closed, 1 half-open, 2 open."),
    Panel("Requests moved", "reqps", ((rate("slipstream_retries_total", "$router", "peer"), "away from {{peer}}"),
                                      (rate("slipstream_retry_budget_exhausted_total", "$router"), "refused"))),
    Panel("Targets ready", "none", (("min(slipstream_targets_ready{$router})", "targets"),)),
    Panel("Certificates last", "s", ((f"min by (service) ({ENDS}{{$any}} or {ENDS}{{$draft}}) - time()",
                                      "{{service}}"),), text="The first of each service that ends."),
))

FALLBACK = Row("Fallback", (
    Panel("Mode of the draft pool", "none", (("max by (mode) (slipstream_mode{$router,scope=\"pool\"})", "{{mode}}"),),
          maximum=1, text="What routers decide for all answers."),
    Panel("Changes of mode", "cps",
          ((rate("slipstream_mode_transitions_total", "$any", "scope", "from", "to", "reason"),
            "{{scope}}: {{from}} to {{to}}, {{reason}}"),), width=16,
          text="pool: a router, for all answers; session: a target, for one of them."),
    Panel("Answers without drafts", "reqps", ((rate("slipstream_fallback_requests_total", "$router", "reason"),
                                           "{{reason}}"),), text="Begun so, as the pool does not pay."),
))

BOARD = Dashboard("transport", "Transport and fallback",
                  "The way between target and draft, and what happens when it fails.", (EXCHANGE, TROUBLE, FALLBACK))
