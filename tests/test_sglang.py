"""slipstream-sglang beside a stub of SGLang's interface. It never ran in SGLang itself."""

from __future__ import annotations

import json
import tomllib
import urllib.request
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import slipstream_sglang
from slipstream_sglang import KNOWN, adapter_0_5_23, adapter_fits
from slipstream_sglang.adapter_0_5_23 import NAME, NODES, adapt
from slipstream_sglang.trees import batch_arrays

from bench.fleet import free_port
from draft_service.worker import DraftWorker
from slipstream.base.errors import ConfigError
from slipstream.drafting.ngram import ORDERS, NgramDrafter
from slipstream.following.chains import Row
from slipstream.models.folder import tokenizer_hash
from slipstream.protocol.messages import PROTOCOL_VERSION, DraftHello, Open, TargetHello
from slipstream.protocol.tree import DraftTree
from tests.pair import local_link_to
from tests.sglang_stub import Arguments, Batch, CustomSpecAlgo, Request, installed, relayed
from tests.test_following import Heard, plain
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parent.parent
PROMPT = list(b"one two three one two three")
HELLO = TargetHello(PROTOCOL_VERSION, 0, "function", 260, "", 4, 2, 4096)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, CustomSpecAlgo]]:
    with installed(monkeypatch) as found:
        adapt()
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def arguments(folder: Path, given: object = None, **changes: Any) -> Arguments:
    """SGLang's arguments, as far as they are read or settled."""
    file = folder / "slipstream.json"
    file.write_text(json.dumps(given or {"drafts": ["127.0.0.1:1"], "prompt_lookup": False, "always": True,
                                        "deadline_s": 30.0}))  # nothing that is counted hangs on the machine's pace
    return Arguments({"tokenizer_path": str(folder)}, **{
        "speculative_adaptive_config": str(file), "speculative_num_draft_tokens": None, "speculative_num_steps": None,
        "speculative_ngram_max_bfs_breadth": 10, "speculative_eagle_topk": None, "disable_overlap_schedule": True,
        "enable_mixed_chunk": True, "max_running_requests": None, "page_size": None, "attention_backend": "fa3",
        "tp_size": 1, "pp_size": 1, "dp_size": 1, "model_path": str(folder), "tokenizer_path": None, **changes})


def worker_of(known: dict[str, CustomSpecAlgo], given: Arguments) -> Any:
    """As SGLang's scheduler comes by it."""
    algorithm = known[NAME]
    assert algorithm.validate_server_args is not None
    algorithm.validate_server_args(given)
    algorithm.handle_server_args(given)
    shape = SimpleNamespace(context_len=4096, vocab_size=260,
                            hf_text_config=SimpleNamespace(hidden_size=4, num_hidden_layers=2))
    return algorithm.create_worker(given)(server_args=given, gpu_id=0, nccl_port=1,
                                          target_worker=SimpleNamespace(model_config=shape))


@contextmanager
def drafted(worker: Any) -> Iterator[None]:
    draft = DraftWorker(NgramDrafter(8, orders=(1, *ORDERS)), "", 30.0)
    draft.start()
    try:
        with local_link_to(HELLO, worker.trees.chains.following, draft):
            yield
    finally:
        draft.stop()


def play(worker: Any, requests: list[Request], steps: int) -> int:
    """Decode. Returns how many draft tokens were accepted. Under the overlapped schedule the scheduler appends what a
    step gave to the answers after the next one has begun."""
    texts = [[*request.origin_input_ids_unpadded, *request.output_ids] for request in requests]
    said = [[plain(1)[0]] if not request.output_ids else [] for request in requests]  # with the prompt
    accepted = 0
    for _ in range(steps):
        if not worker.enable_overlap:
            for request, new in zip(requests, said, strict=True):
                request.output_ids.extend(new)
        for text, new in zip(texts, said, strict=True):
            text += new
        given = worker.verify(Batch(requests, *relayed(said, worker.draft_token_num)), texts)
        if worker.enable_overlap:
            for request, new in zip(requests, said, strict=True):
                request.output_ids.extend(new)
        said = given
        accepted += sum(len(new) - 1 for new in said)
    for request, new in zip(requests, said, strict=True):
        request.output_ids.extend(new)
    return accepted


def two() -> list[Request]:
    return [Request("a", PROMPT), Request("b", PROMPT)]


@pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("breadth", [10, 1], ids=["trees", "chains"])
def test_answers_are_the_engines_own_and_drafts_are_used(known: dict[str, CustomSpecAlgo], folder: Path,
                                                         synchronous: bool, breadth: int,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    worker = worker_of(known, arguments(folder, disable_overlap_schedule=synchronous, speculative_num_draft_tokens=6,
                                        speculative_ngram_max_bfs_breadth=breadth))
    requests, chains, told = two(), worker.trees.chains, list[Row]()
    step = chains.step
    monkeypatch.setattr(chains, "step", lambda rows, *rest: step(told.extend(rows) or rows, *rest))
    with drafted(worker):
        assert play(worker, requests, 45) > 40
    for request in requests:
        assert list(request.output_ids) == plain(len(request.output_ids))
    trees = [row for row in told if row.ranks is not None]
    assert bool(trees) == (breadth > 1) and all(len(row.ranks or ()) == len(row.new_tokens) - 1 for row in trees)


@pytest.mark.parametrize(("option", "words"), [
    ({"tls": {"folder": "/nowhere"}}, "tls: cannot read /nowhere/tls.crt"),
    ({"drafts": ["kubernetes:///draft.llm:50052"], "kubeconfig": "/nowhere.yaml"}, "Invalid kube-config file")])
def test_drafts_are_dialled_as_the_options_say(known: dict[str, CustomSpecAlgo], folder: Path, option: dict[str, Any],
                                               words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worker_of(known, arguments(folder, {"drafts": ["127.0.0.1:1"], **option}))


def test_it_has_a_page_of_metrics(known: dict[str, CustomSpecAlgo], folder: Path) -> None:
    page = f"127.0.0.1:{free_port()}"
    worker = worker_of(known, arguments(folder, {"drafts": ["127.0.0.1:1"], "metrics_listen": page}))
    with urllib.request.urlopen(f"http://{page}/metrics", timeout=60) as reply:
        assert b"slipstream_drafts_connected" in reply.read()
    worker.links.page.close()


def test_drafts_are_told_the_tokenizer_that_sglang_takes(known: dict[str, CustomSpecAlgo], folder: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path stands nowhere where ``--tokenizer-path`` is left out: SGLang declares that it is the model's."""
    hellos = list[TargetHello]()
    monkeypatch.setattr(adapter_0_5_23, "Links", lambda options, hello, *_: hellos.append(hello))
    worker_of(known, arguments(folder))
    assert [hello.tokenizer_hash for hello in hellos] == [tokenizer_hash(folder)]


def test_without_a_draft_each_step_gives_a_token(known: dict[str, CustomSpecAlgo], folder: Path) -> None:
    worker, requests = worker_of(known, arguments(folder)), two()
    assert worker.draft_token_num == NODES and play(worker, requests, 5) == 0
    assert list(requests[0].output_ids) == plain(6)


def test_who_leaves_is_closed_and_who_returns_is_followed_again(known: dict[str, CustomSpecAlgo], folder: Path) -> None:
    worker, requests = worker_of(known, arguments(folder)), two()
    following = worker.trees.chains.following
    with drafted(worker):
        play(worker, requests, 4)
        play(worker, requests[:1], 4)
        assert len(following.sessions) == 1
        assert play(worker, requests, 20) > 20
        assert len(following.sessions) == 2
        worker.clear_cache_pool()
        assert not following.sessions
    for request in requests:
        assert list(request.output_ids) == plain(len(request.output_ids))


def test_what_drafts_do_wrong_reaches_nobody(known: dict[str, CustomSpecAlgo], folder: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    worker, requests = worker_of(known, arguments(folder)), two()
    play(worker, requests, 2)

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    for verb in ("committed", "take"):
        with monkeypatch.context() as patch:
            patch.setattr(worker.trees.chains.following, verb, broken)
            play(worker, requests, 2)
    with drafted(worker):
        assert play(worker, requests, 20) > 20
    assert list(requests[0].output_ids) == plain(len(requests[0].output_ids))


def test_what_stands_for_pictures_is_told_as_a_token_of_the_model(known: dict[str, CustomSpecAlgo],
                                                                  folder: Path) -> None:
    """Ids above the vocabulary, and below it: a draft refuses them, and a lookup would say them again."""
    worker = worker_of(known, arguments(folder, {"drafts": ["127.0.0.1:1"], "always": True, "deadline_s": 0.01}))
    prompt = [*PROMPT, 300, 5000, -1, *PROMPT]
    request, heard = Request("a", prompt, output_ids=array("q", PROMPT[:1])), Heard()
    worker.trees.chains.following.link_up(heard, DraftHello(PROTOCOL_VERSION, 0, "any", 0, "", None, 0, 4096, 12, 8))
    worker.verify(Batch([request], *relayed([[]], worker.draft_token_num)), [[*prompt, *request.output_ids]])
    (opened,) = (item for item in heard.items if isinstance(item, Open))
    assert opened.tokens.tolist() == [*PROMPT, 0, 0, 0, *PROMPT, PROMPT[0]]


def test_a_tree_is_laid_out_as_masks() -> None:
    tree = DraftTree(5, [7, 1, 2, 3], [-1, 0, 0, 1], [0, 1, 2, 3], [0.0] * 4)
    tokens, mask = batch_arrays([7, 9], [tree, None], 5)
    assert tokens.tolist() == [7, 1, 2, 3, 0, 9, 0, 1, 2, 3]
    assert mask.reshape(2, 5, 5)[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 0, 0, 1]]
    stale, _ = batch_arrays([8], [tree], 5)
    assert stale.tolist() == [8, 0, 1, 2, 3]


def test_a_sampled_token_comes_as_often_as_the_model_says() -> None:
    """SGLang adds up the chances of siblings: one that two of them carry would come twice as often."""
    tree = DraftTree(5, [7, 0, 2, 1], [-1, 0, 0, 1], [0, 1, 2, 3], [0.0] * 4)
    tokens, mask = batch_arrays([7, 9], [tree, None], 8)
    for one, ancestors in zip(tokens.reshape(2, 8), mask.reshape(2, 8, 8), strict=True):
        below = [(int(np.flatnonzero(ancestors[node, :node])[-1]), int(one[node])) for node in range(1, 8)]
        assert len(set(below)) == 7, below


def test_the_algorithm_is_one_of_the_n_gram_kind(known: dict[str, CustomSpecAlgo], folder: Path) -> None:
    algorithm, given = known[NAME], arguments(folder)
    algorithm.handle_server_args(given)
    assert getattr(algorithm, "is_ngram")() and not algorithm.has_draft_kv() and algorithm.supports_overlap  # noqa: B009
    assert not given.enable_mixed_chunk and given.speculative_eagle_topk == 10 and given.speculative_num_steps == 1


def test_the_algorithm_answers_what_the_scheduler_asks_as_it_begins(known: dict[str, CustomSpecAlgo]) -> None:
    algorithm: Any = known[NAME]
    assert not algorithm.carries_draft_hidden_states() and not algorithm.need_topk()
    relay = algorithm.create_future_map("cpu", SimpleNamespace(), needs_cpu_seq_lens=True, needs_confidence_relay=False)
    assert relay.spec_algo is algorithm and relay.needs_cpu_seq_lens


@pytest.mark.parametrize(("changes", "words"), [
    ({"tp_size": 2}, "--tp-size 2"), ({"speculative_adaptive_config": None}, "--speculative-adaptive-config"),
    ({"speculative_adaptive_config": "/nowhere.json"}, "/nowhere.json"),
    ({"given": {"drafts": []}}, "slipstream.drafts"), ({"given": {"drafts": ["a:1"], "layers": [2]}}, "layers"),
    ({"given": {"drafts": ["a:1"], "rounds": "/told"}}, "slipstream.rounds"),
    ({"speculative_num_draft_tokens": 1}, "at least 2"), ({"page_size": 16}, "--page-size above 1"),
])
def test_what_cannot_be_is_refused_by_name(known: dict[str, CustomSpecAlgo], folder: Path, changes: dict[str, Any],
                                           words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worker_of(known, arguments(folder, **changes))


def test_what_installs_it_has_all_that_it_needs_of_ours() -> None:
    """No index has it."""
    said = (slipstream_sglang.__doc__ or "").split("pip install ")[1].split("#")[0].split()
    project = tomllib.loads((ROOT / "integrations" / "sglang" / "pyproject.toml").read_text("utf-8"))["project"]
    ours = {name.split("==")[0] for name in project["dependencies"]} | {project["name"]}
    found = {tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]["name"] for folder in said}
    assert found == ours


def test_other_versions_are_refused_by_name() -> None:
    for found in ("0.5.22", "0.6.0", ""):
        with pytest.raises(ConfigError, match=found or "none installed"):
            adapter_fits(found)
    adapter_fits(KNOWN)
