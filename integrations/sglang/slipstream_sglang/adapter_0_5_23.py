"""SGLang 0.5.23: an algorithm of its registry whose trees are ours, and whose verification is its n-gram worker's.

That worker calls ``_prepare_draft_tokens`` for tokens and masks of a batch and does the rest: KV, the forward,
choosing, moving accepted KV. So our worker is a subclass, and the algorithm returns true for ``is_ngram``, on which
batches, masks and the overlapped schedule depend. With that schedule the tokens of the last step are not in a request's
answer yet.

**It has never run in SGLang**: names and signatures are those of its wheel. Only one GPU a target, because each further
one would draft trees of its own. It knows nothing about drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream_vllm.links import Links
from slipstream_vllm.options import Options
from slipstream_vllm.tokenizer import digest_of

from slipstream.base.errors import ConfigError
from slipstream.following.chains import Chains
from slipstream.observe.metrics import TargetMetrics
from slipstream.protocol.messages import PROTOCOL_VERSION, TargetHello
from slipstream_sglang.trees import Mask, Tokens, Trees, VerifyRequest

NAME = "SLIPSTREAM"
NODES = 12  # of a tree, root included, where --speculative-num-draft-tokens is not given


def adapt() -> None:
    """Register the algorithm; once a process."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.speculative.ngram_worker import NGRAMWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        # The scheduler asks the next three of every algorithm, and those of the registry lack them in 0.5.23.
        def carries_draft_hidden_states(self) -> bool:
            return False

        def need_topk(self) -> bool:
            return False

        def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
            return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

        def handle_server_args(self, server_args: Any) -> None:
            settle(server_args)

    def factory(server_args: Any) -> type:
        return worker_of(NGRAMWorker, resolving_view)

    register = SpeculativeAlgorithm.register(NAME, supports_overlap=True, validate_server_args=check,
                                             spec_class=Algorithm)
    register(factory)


def worker_of(ngram_worker: Any, resolved: Callable[[Any], Any]) -> type:
    """Our worker, a subclass of ``ngram_worker``, SGLang's. ``resolved``: gives the arguments that are in force."""
    class RemoteWorker(ngram_worker):  # type: ignore[misc]
        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            resolved_args = resolved(server_args)  # the record has what was written alone
            options, shape = options_of(resolved_args), target_worker.model_config
            metrics = TargetMetrics(str(resolved_args.model_path))
            chains = Chains(options.section(self.draft_token_num - 1), metrics)
            self.limit = shape.context_len
            branches = resolved_args.speculative_ngram_max_bfs_breadth > 1
            self.trees = Trees(chains, self.draft_token_num, shape.vocab_size, branches)
            self.links = Links(options, hello_of(resolved_args, shape), chains.following, metrics)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[Tokens, Mask]:
            return self.trees.propose(requests_of(self, batch))

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Do nothing: our drafts keep no n-grams here."""

        def clear_cache_pool(self) -> None:
            super().clear_cache_pool()
            self.trees.forget()

    return RemoteWorker


def hello_of(server_args: Any, shape: Any) -> TargetHello:
    """The target's half of the handshake. ``server_args``: resolved; ``shape``: SGLang's configuration of the model."""
    text = shape.hf_text_config
    return TargetHello(PROTOCOL_VERSION, 0, str(server_args.model_path), shape.vocab_size,
                       digest_of(str(server_args.tokenizer_path), getattr(server_args, "revision", None)),
                       text.hidden_size, text.num_hidden_layers, shape.context_len)


def requests_of(worker: Any, batch: Any) -> list[VerifyRequest]:
    """The requests of ``batch``, in its order."""
    nodes = worker.draft_token_num
    late, counts = list[int](), [0] * len(batch.reqs)
    if worker.enable_overlap and not batch.grammar_needs_sync():
        late, counts = batch.spec_info.accept_tokens.tolist(), batch.spec_info.accept_lens.tolist()
    requests = []
    for index, request in enumerate(batch.reqs):
        prompt, most = request.origin_input_ids_unpadded, request.sampling_params.max_new_tokens
        newest = late[index * nodes : index * nodes + counts[index]]
        limit = worker.limit if most is None else min(worker.limit, len(prompt) + most)
        requests.append(VerifyRequest(request.rid, prompt, request.output_ids, newest, limit))
    return requests


def options_of(server_args: Any) -> Options:
    """The options in --speculative-adaptive-config. Raises ConfigError naming the field."""
    path = server_args.speculative_adaptive_config
    if not path:
        raise ConfigError('--speculative-adaptive-config: name a file that names the draft services, as in '
                          '{"drafts": ["draft:8052"]}')
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--speculative-adaptive-config: {path}: {error}") from error
    options = Options.of(content)
    if isinstance(content, Mapping) and (content.get("layers") or content.get("features_gb")):
        raise ConfigError("slipstream.layers: states are not taken out of SGLang; drafters that read none fit")
    return options


def check(server_args: Any) -> None:
    """Check the arguments before anything is loaded. Raises ConfigError naming the argument."""
    options_of(server_args)
    for name in ("tp_size", "pp_size", "dp_size"):
        if (value := getattr(server_args, name)) > 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: drafts are asked on one GPU alone")


def settle(server_args: Any) -> None:
    """Set the arguments that SGLang sets for its n-gram drafts. Raises ConfigError naming the argument."""
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = NODES
    nodes, breadth = server_args.speculative_num_draft_tokens, server_args.speculative_ngram_max_bfs_breadth
    if nodes < 2:
        raise ConfigError("--speculative-num-draft-tokens: at least 2, the newest token is one of them")
    server_args.enable_mixed_chunk = False
    server_args.speculative_eagle_topk = breadth
    if server_args.speculative_num_steps is None:
        server_args.speculative_num_steps = max(1, nodes // breadth)
    if server_args.max_running_requests is None:
        server_args.max_running_requests = 48
    if breadth > 1 and (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer":
        raise ConfigError("--page-size above 1 with trees: take --attention-backend flashinfer, or "
                          "--speculative-ngram-max-bfs-breadth 1 for chains")
