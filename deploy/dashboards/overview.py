"""The first board: what clients see, and whether anything is wrong."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Row, quantiles, rate, ratio

REQUESTS = "slipstream_requests_total"
ERRORS = rate(REQUESTS, '$router,code=~"5.."')
ALL = rate(REQUESTS, "$router")

NOW = Row("Now", (
    Panel("Requests", "reqps", ((ALL, "requests"),), kind="stat", width=4, height=4),
    Panel("Errors", "percentunit", ((ratio(f"({ERRORS} or vector(0))", ALL), "5xx"),), kind="stat", width=4, height=4,
          text="Share of requests that ended with 5xx."),
    Panel("Tokens", "none", ((rate("slipstream_generation_tokens_total", "$router"), "tokens/s"),), kind="stat",
          width=4, height=4, text="Tokens generated per second."),
    Panel("First token, p95", "s", (quantiles("slipstream_time_to_first_token_seconds", "$router")[1],), kind="stat",
          width=4, height=4),
    Panel("Targets ready", "none", (("min(slipstream_targets_ready{$router})", "targets"),), kind="stat", width=4,
          height=4, text="Targets that can take requests, as seen by the router that sees the fewest."),
    Panel("Drafts connected", "none", (("sum(slipstream_drafts_connected{$target})", "streams"),), kind="stat",
          width=4, height=4, text="Streams between targets and drafts that are up."),
))

REQUEST_ROW = Row("Requests", (
    Panel("Requests by status", "reqps", ((rate(REQUESTS, "$router", "code"), "{{code}}"),), stacked=True),
    Panel("Requests by mode", "reqps", ((rate(REQUESTS, "$router", "mode"), "{{mode}}"),), stacked=True,
          text="The mode in which the answer began: speculative or plain; none: the request got no token."),
    Panel("Failures by type", "reqps", ((rate("slipstream_request_errors_total", "$router", "type"), "{{type}}"),),
          stacked=True),
    Panel("Refused by tenant", "reqps", ((rate("slipstream_requests_refused_total", "$router", "tenant", "reason"),
                                          "{{tenant}}: {{reason}}"),), stacked=True),
    Panel("Running and waiting", "none", (("sum(slipstream_requests_in_flight{$router})", "running"),
                                          ("sum(slipstream_queue_depth{$router})", "waiting"))),
    Panel("Connections", "none", (("sum by (state) (slipstream_http_connections{$router})", "{{state}}"),
                                  (rate("slipstream_http_connections_refused_total", "$router", "reason"),
                                   "closed or refused: {{reason}}/s")),
          text="at_work: a whole request is being answered; idle: the router waits for the client."),
    Panel("Wait for admission", "s", quantiles("slipstream_queue_wait_seconds", "$router")),
    Panel("Event loop's lag", "s", (("histogram_quantile(0.99, sum by (le, pod) (rate("
          "slipstream_event_loop_lag_seconds_bucket{$router}[$__rate_interval])))", "p99 {{pod}}"),),
          text="How late each router's event loop runs what is due. All its streams wait this long."),
    Panel("Request duration", "s", quantiles("slipstream_request_duration_seconds", "$router")),
))

TOKENS = Row("Tokens", (
    Panel("First token", "s", quantiles("slipstream_time_to_first_token_seconds", "$router"),
          text="From a request's arrival to its first token."),
    Panel("Between tokens", "s", quantiles("slipstream_inter_token_latency_seconds", "$router")),
    Panel("Tokens by mode", "none", ((rate("slipstream_generation_tokens_total", "$router", "mode"), "{{mode}}"),),
          stacked=True),
    Panel("Answers by outcome", "reqps", ((rate("slipstream_answers_total", "$target", "outcome"), "{{outcome}}"),),
          stacked=True, text="As targets count. A request may have several answers. handed_back: the router "
               "moves it to another target."),
    Panel("Prompt tokens", "none", ((rate("slipstream_prompt_tokens_total", "$router"), "asked"),
                                    (rate("slipstream_answer_prompt_tokens_total", "$target"), "at targets"),
                                    (rate("slipstream_prefix_cache_hit_tokens_total", "$target"), "found in cache"))),
    Panel("Prefix cache", "percentunit",
          ((ratio(rate("slipstream_prefix_cache_hit_tokens_total", "$target"),
                  rate("slipstream_answer_prompt_tokens_total", "$target")), "hits"),), maximum=1,
          text="Share of prompt tokens found in the cache and not computed again."),
    Panel("Mode", "none", (("max by (scope, mode) (slipstream_mode{$any})", "{{scope}} {{mode}}"),),
          text="1 for the mode of new work."),
))

TARGETS = Row("Targets", (
    Panel("Sessions", "none", (("sum by (state) (slipstream_sessions{$target})", "{{state}}"),), stacked=True),
    Panel("KV slots", "none", (("sum by (state) (slipstream_kv_slots{$target})", "{{state}}"),), stacked=True,
          text="used: held by running answers; cached: prefix cache, freed when slots are needed."),
    Panel("Preemptions", "cps", ((rate("slipstream_preemptions_total", "$target"), "preemptions/s"),),
          text="Running answers that lost their KV slots to others. Their KV is computed again."),
    Panel("Device memory", "none", (("max(slipstream_shedding_level{$target})", "level"),
                                    (rate("slipstream_device_full_total", "$target"), "steps without memory/s")),
          text="Level: what the fullest target gives up to save memory. 1: half of each tree, 2: all drafts, 3: also "
               "new answers."),
))

BOARD = Dashboard("overview", "Overview", "What clients see, and whether anything is wrong.",
                  (NOW, REQUEST_ROW, TOKENS, TARGETS))
