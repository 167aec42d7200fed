"""Following: the target's half of speculation beside any engine. Committed tokens in, draft trees or chains out.

An engine calls it on its own thread. Links (``messages.Link``: gRPC, in process, or a test's) may call from any thread.

    following = Following(TargetSection(), StepCosts({1: 0.02, 64: 0.03}), TargetMetrics("model"))
    link = LocalLink(hello, following, peers)   # or wire.link.DraftLink
    followed = following.open(1, tokens, prompt_len, Sampling(), limit=len(tokens) + 100)
    following.begin([followed], now_s)
    while not over:
        (tree,) = following.take([followed], within_s=0.05)  # never longer; root only: decode plain
        chain = followed.chain(4)                            # for an engine that verifies one path
        ...                                                  # one forward of the engine, choose, walk
        following.committed([Verified(followed.session, new_tokens, len(tree) - 1, accepted)], step)
        following.flush()
    following.close(followed)

``Chains`` does this for an engine that asks once a step and verifies every chain it gets.

It imports no torch, no asyncio, no grpc, no engine: an engine is a caller that may have feature rows to give.
"""
