"""The second board: whether drafts pay, and where they stop paying."""

from __future__ import annotations

from deploy.dashboards.panels import Dashboard, Panel, Row, quantiles, rate, ratio, share

DRAFTS = rate("slipstream_drafts_total", "$target")
DRAFTED = rate("slipstream_draft_tokens_total", "$target")
ACCEPTED = rate("slipstream_accepted_tokens_total", "$target")
BONUS = rate("slipstream_bonus_tokens_total", "$target")
STEPS = rate("slipstream_step_seconds_sum", "$target")

PAYING = Row("Does it pay", (
    Panel("Acceptance length", "none", ((f"1 + {ratio(ACCEPTED, DRAFTS)}", "tokens"),), minimum=1,
          text="Tokens for each step that verified drafts; 1 is plain decoding."),
    Panel("Acceptance", "percentunit", ((ratio(ACCEPTED, DRAFTED), "accepted of drafted"),), maximum=1,
          text="Draft tokens that became part of an answer. Wide trees have a low share and may still pay."),
    Panel("Output from drafts", "percentunit", ((ratio(ACCEPTED, f"({ACCEPTED} + {BONUS})"), "share"),), maximum=1,
          text="Share of all emitted tokens that a draft had guessed."),
    Panel("Tokens per second of stepping", "none", ((ratio(f"({ACCEPTED} + {BONUS})", STEPS), "tokens/s"),),
          text="Emitted tokens over the time that targets spent in steps: what speculation is to raise."),
    Panel("Token flow", "none", ((DRAFTED, "drafted"), (ACCEPTED, "accepted"), (BONUS, "the target's own"))),
    Panel("Acceptance of an answer", "percentunit", quantiles("slipstream_request_acceptance_ratio", "$router"),
          maximum=1, text="Over answers. A heap at 1 betrays answers that loop."),
))

SHAPE = Row("Trees", (
    Panel("Reached depth", "percentunit",
          ((share(rate("slipstream_accepted_tokens_per_position_total", "$target", "position"), DRAFTS),
            "depth {{position}}"),), kind="bargauge", maximum=1,
          text="Share of verifications that accepted a draft token at this depth."),
    Panel("Nodes of a tree", "none", quantiles("slipstream_tree_nodes", "$target")),
    Panel("Accepted tokens of a tree", "none", quantiles("slipstream_accepted_length", "$target")),
))

ROUNDS = Row("Rounds", (
    Panel("Rounds by outcome", "ops", ((rate("slipstream_rounds_total", "$target", "outcome"), "{{outcome}}"),),
          stacked=True, text="used, prompt_lookup, plain, draft_missing, discarded_late."),
    Panel("Growing", "s", quantiles("slipstream_draft_seconds", "$draft"),
          text="One growth of all sessions of a batch, in the draft."),
    Panel("Rows of a step", "none", quantiles("slipstream_step_rows", "$target"),
          text="Prompt rows, plain steps and tree nodes together."),
    Panel("Nodes grown", "none", ((rate("slipstream_grown_nodes_total", "$draft", "model"), "{{model}}"),),
          stacked=True, text="By drafter. What is grown and not verified above was too late, or not worth a row."),
    Panel("Commits absorbed", "cps", ((rate("slipstream_commits_total", "$draft", "model"), "{{model}}"),)),
    Panel("Sessions at drafts", "none", (("sum by (model) (slipstream_sessions_open{$draft})", "{{model}}"),)),
))

BY_DRAFTER = {kind: rate("slipstream_drafter_tokens_total", f'$target,kind="{kind}"', "drafter")
              for kind in ("accepted", "drafted")}

FIT = Row("Do they fit", (
    Panel("Acceptance by drafter", "percentunit", ((ratio(BY_DRAFTER["accepted"], BY_DRAFTER["drafted"]),
                                                    "{{drafter}}"),), maximum=1,
          text="What a new head on trial is compared by."),
    Panel("Drafters right by chance only", "none",
          (("max by (peer) (slipstream_pairing_suspect{$target})", "{{peer}}"),), maximum=1,
          text="1: no better than guessing, as with a head that was made for another model."),
    Panel("Lossy targets", "none", (("sum(slipstream_lossy{$target})", "targets"),),
          text="With accept thresholds below 1: sampled answers are not the model's own."),
    Panel("Taken although the target chose others", "none",
          ((rate("slipstream_lenient_tokens_total", "$target"), "tokens/s"),)),
))

# Of `vllm serve` with our proposer, where it is scraped; a target of ours with vLLM's engine has the names above.
SERVED = 'namespace=~"$namespace",model_name=~"$model"'
VLLM_DRAFTS, VLLM_DRAFTED, VLLM_ACCEPTED = (rate(f"vllm:spec_decode_num_{name}_total", SERVED)
                                            for name in ("drafts", "draft_tokens", "accepted_tokens"))

VLLM = Row("vLLM's own server", (
    Panel("vLLM: acceptance length", "none", ((f"1 + {ratio(VLLM_ACCEPTED, VLLM_DRAFTS)}", "tokens"),), minimum=1,
          text="Tokens for each verification of drafts, as vLLM counts."),
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
