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
          stacked=True, maximum=1, text="draft_wait: for draft tokens; verify: the forward pass; host: the rest."),
    Panel("Wait for drafts", "s", quantiles(STEP, '$target,phase="draft_wait"')),
    Panel("Verify", "s", quantiles(STEP, '$target,phase="verify"')),
    Panel("Bytes", "Bps", ((rate("slipstream_wire_bytes_total", "$target", "direction"), "{{direction}}"),),
          text="Between targets and drafts, as targets count them."),
    Panel("Bytes for a token", "bytes", ((ratio(rate("slipstream_wire_bytes_total", "$target"), EMITTED), "bytes"),),
          text="In both directions together, for each emitted token."),
    Panel("Streams", "none", (("sum(slipstream_drafts_connected{$target})", "targets see"),
                              ("sum(slipstream_targets_connected{$draft})", "drafts see"),
                              ("sum(slipstream_drafts_expected{$target})", "expected"))),
))

TROUBLE = Row("Trouble", (
    Panel("Drafts lost", "cps", ((rate("slipstream_drafter_lost_total", "$target", "reason"), "{{reason}}"),),
          text="Streams to drafts that ended. Answers went on without draft tokens, or with another draft."),
    Panel("Answers moved to another draft", "cps", ((rate("slipstream_drafter_moves_total", "$target"), "moved"),),
          text="Their draft was lost, drained or was slow, and another one had room."),
    Panel("Growth of no use", "cps", ((rate("slipstream_stale_growths_total", "$target"), "too late"),
                                      (rate("slipstream_invalid_growths_total", "$target"), "refused by targets"),
                                      (rate("slipstream_invalid_items_total", "$draft"), "refused by drafts"))),
    Panel("Sessions that drafts gave up", "cps",
          ((rate("slipstream_session_expirations_total", "$draft", "reason"), "{{reason}}"),)),
    Panel("Targets' breakers", "none", (("max by (peer) (slipstream_breaker_state{$router})", "{{peer}}"),), maximum=2,
          text="0 closed: requests pass; 1 half-open: one request tests the target; 2 open: it gets none."),
    Panel("Requests moved", "reqps", ((rate("slipstream_retries_total", "$router", "peer"), "away from {{peer}}"),
                                      (rate("slipstream_retry_budget_exhausted_total", "$router"), "refused"))),
    Panel("Targets ready", "none", (("min(slipstream_targets_ready{$router})", "targets"),)),
    Panel("Certificates last", "s", ((f"min by (service) ({ENDS}{{$any}} or {ENDS}{{$draft}}) - time()",
                                      "{{service}}"),), text="Until the first certificate of each service expires."),
))

FALLBACK = Row("Fallback", (
    Panel("Mode of the draft pool", "none", (("max by (mode) (slipstream_mode{$router,scope=\"pool\"})", "{{mode}}"),),
          maximum=1, text="The mode that routers chose for all answers."),
    Panel("Changes of mode", "cps",
          ((rate("slipstream_mode_transitions_total", "$any", "scope", "from", "to", "reason"),
            "{{scope}}: {{from}} to {{to}}, {{reason}}"),), width=16,
          text="pool: decided by a router for all answers; session: by a target for one answer."),
    Panel("Answers without drafts", "reqps", ((rate("slipstream_fallback_requests_total", "$router", "reason"),
                                           "{{reason}}"),), text="Their router had stopped speculation."),
))

BOARD = Dashboard("transport", "Transport and fallback",
                  "The way between target and draft, and what happens when it fails.", (EXCHANGE, TROUBLE, FALLBACK))
