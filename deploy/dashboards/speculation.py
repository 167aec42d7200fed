"""The second board: whether drafts pay, and where they stop paying."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Row, quantiles, rate, ratio, share

DRAFTS = rate("slipstream_drafts_total", "$target")
DRAFTED = rate("slipstream_draft_tokens_total", "$target")
ACCEPTED = rate("slipstream_accepted_tokens_total", "$target")
BONUS = rate("slipstream_bonus_tokens_total", "$target")
STEPS = rate("slipstream_step_seconds_sum", "$target")
REACHED = share(rate("slipstream_accepted_tokens_per_position_total", "$target", "position"), DRAFTS)

PAYING = Row("Does it pay", (
    Panel("Acceptance length", "none", ((f"1 + {ratio(ACCEPTED, DRAFTS)}", "tokens"),), minimum=1,
          text="Tokens for each verification of draft tokens, the bonus token included; 1 is plain decoding."),
    Panel("Acceptance", "percentunit", ((ratio(ACCEPTED, DRAFTED), "accepted of drafted"),), maximum=1,
          text="Share of verified draft tokens that were accepted. Wide trees have a low share and may still pay."),
    Panel("Output from drafts", "percentunit", ((ratio(ACCEPTED, f"({ACCEPTED} + {BONUS})"), "share"),), maximum=1,
          text="Share of all emitted tokens that are accepted draft tokens, those of prompt lookup included."),
    Panel("Tokens per second of stepping", "none", ((ratio(f"({ACCEPTED} + {BONUS})", STEPS), "tokens/s"),),
          text="Emitted tokens divided by the time that targets spent in steps. Speculation should raise this."),
    Panel("Token flow", "none", ((DRAFTED, "drafted"), (ACCEPTED, "accepted"), (BONUS, "bonus"))),
    Panel("Acceptance of an answer", "percentunit", quantiles("slipstream_request_acceptance_ratio", "$router"),
          maximum=1, text="Acceptance of single answers. Many at 1: they may repeat themselves endlessly."),
))

SHAPE = Row("Trees", (
    Panel("Reached depth", "percentunit",
          ((f"sort_desc({REACHED})", "depth {{position}}"),), kind="bargauge", maximum=1,
          text="Share of verifications that accepted a draft token at this depth."),
    Panel("Nodes of a tree", "none", quantiles("slipstream_tree_nodes", "$target")),
    Panel("Accepted tokens of a tree", "none", quantiles("slipstream_accepted_length", "$target")),
))

ROUNDS = Row("Rounds", (
    Panel("Rounds by outcome", "ops", ((rate("slipstream_rounds_total", "$target", "outcome"), "{{outcome}}"),),
          stacked=True, text="Draft tokens came from a drafter (used) or from prompt_lookup. Or there were none: not "
               "wanted (plain), no drafter or none from it (draft_missing), its reply was late (discarded_late)."),
    Panel("Growing", "s", quantiles("slipstream_draft_seconds", "$draft"),
          text="Time that a draft takes to grow draft tokens for a batch of sessions."),
    Panel("Rows of a step", "none", quantiles("slipstream_step_rows", "$target"),
          text="Rows that one step computes: prompt tokens, roots and draft tokens."),
    Panel("Nodes grown", "none", ((rate("slipstream_grown_nodes_total", "$draft", "model"), "{{model}}"),),
          stacked=True, text="By draft model. A node that is not verified came too late, or was not worth a row."),
    Panel("Commits absorbed", "cps", ((rate("slipstream_commits_total", "$draft", "model"), "{{model}}"),)),
    Panel("Sessions at drafts", "none", (("sum by (model) (slipstream_sessions_open{$draft})", "{{model}}"),)),
))

BY_DRAFTER = {kind: rate("slipstream_drafter_tokens_total", f'$target,kind="{kind}"', "drafter")
              for kind in ("accepted", "drafted")}

FIT = Row("Do they fit", (
    Panel("Acceptance by drafter", "percentunit", ((ratio(BY_DRAFTER["accepted"], BY_DRAFTER["drafted"]),
                                                    "{{drafter}}"),), maximum=1,
          text="Compare a new draft head (a canary) with the present one here."),
    Panel("Drafters right by chance only", "none",
          (("max by (peer) (slipstream_pairing_suspect{$target})", "{{peer}}"),), maximum=1,
          text="1: its tokens agree with the target no more than by chance, as with a head made for another model."),
    Panel("Lossy targets", "none", (("sum(slipstream_lossy{$target})", "targets"),),
          text="Targets with accept thresholds below 1: sampled answers may differ from the model's own."),
    Panel("Taken although the target chose others", "none",
          ((rate("slipstream_lenient_tokens_total", "$target"), "tokens/s"),)),
))

# Of `vllm serve` with slipstream-vllm, if it is scraped. A Slipstream target with vLLM's engine has the names above.
SERVED = 'namespace=~"$namespace",model_name=~"$model"'
VLLM_DRAFTS, VLLM_DRAFTED, VLLM_ACCEPTED = (rate(f"vllm:spec_decode_num_{name}_total", SERVED)
                                            for name in ("drafts", "draft_tokens", "accepted_tokens"))

VLLM = Row("vLLM's own server", (
    Panel("vLLM: acceptance length", "none", ((f"1 + {ratio(VLLM_ACCEPTED, VLLM_DRAFTS)}", "tokens"),), minimum=1,
          text="Tokens for each verification of draft tokens, as vLLM counts."),
    Panel("vLLM: token flow", "none", ((VLLM_DRAFTED, "drafted"), (VLLM_ACCEPTED, "accepted"),
                                       (rate("vllm:generation_tokens_total", SERVED), "emitted"))),
    Panel("vLLM: requests", "none", ((f"sum(vllm:num_requests_running{{{SERVED}}})", "running"),
                                     (f"sum(vllm:num_requests_waiting{{{SERVED}}})", "waiting"))),
    Panel("vLLM: KV in use", "percentunit", ((f"max(vllm:kv_cache_usage_perc{{{SERVED}}})", "fullest"),), maximum=1),
    Panel("vLLM: between tokens", "s", quantiles("vllm:inter_token_latency_seconds", SERVED)),
    Panel("vLLM: preemptions", "cps", ((rate("vllm:num_preemptions_total", SERVED), "preemptions/s"),)),
))

BOARD = Dashboard("speculation", "Speculation", "Whether drafts pay, and where they stop paying.",
                  (PAYING, SHAPE, ROUNDS, FIT, VLLM))
