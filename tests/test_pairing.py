"""A head that was made for another target is told of, once and loudly; one that was made for it is not."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from time import monotonic

import numpy as np
import psutil
import pytest
from rich.console import Console
from scipy import stats
from structlog.testing import capture_logs

from bench.fleet import free_port
from slipstream.base.config import Config, DraftSection, GrowthSection, ModelSection
from slipstream.cli import colocated
from slipstream.cli.doctor import checks
from slipstream.cli.host import ENOUGH_ACCEPTED, FIND_DRAFT_S, draft_missing, look_at_draft, pairing_problem
from slipstream.cli.process import Launch
from slipstream.drafting import Drafter, create
from slipstream.following.pool import FORGET_ROUNDS, SUSPECT_BELOW, SUSPECT_ROUNDS, Agreement
from slipstream.models.folder import MADE_FOR, made_for, weights_hash
from slipstream.protocol.identity import Identity
from slipstream.protocol.requests import DraftStatus, Request, Sampling, ServedModel
from slipstream.wire.server import GrpcServer
from slipstream.wire.target import TargetServicer
from target_service.service import TargetService
from tests.eagle_folder import eagle_config, write_eagle_folder
from tests.loop import eventually
from tests.pair import STUBBORN, WIRE, drafting, grpc_link, local_link, target
from tests.scraped import scraped

pytestmark = pytest.mark.usefixtures("servers_end")

IDENTITY = Identity("of-its-weights", "float32", "none", "of-its-kind")
TEXT = b"one two three one two three one two three one"
GROWTH = GrowthSection(num_steps=3, topk=2, num_draft_tokens=6)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: a head for another target with this one's shapes."""
    return write_eagle_folder(tmp_path_factory.mktemp("pairing") / "head", eagle_config(eagle_config={
        "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [-1, 0, 0]}))


def drafter(kind: str, folder: Path, model: Path) -> Drafter:
    section = DraftSection(drafter=kind, model=str(model), dtype="float64", growth=GROWTH)
    return create(section, ModelSection(path=str(folder), dtype="float64"), 2048)


@pytest.mark.parametrize(("agreed", "rounds"), [(0, 1), (0, 64), (3, 64), (5, 300), (150, 300), (64, 64)])
def test_the_bound_is_wilsons(agreed: int, rounds: int) -> None:
    interval = stats.binomtest(agreed, rounds).proportion_ci(0.90, method="wilson")
    assert Agreement(rounds, agreed).at_most == pytest.approx(interval.high, abs=1e-4)


def test_few_rounds_and_fair_drafters_are_not_suspected() -> None:
    assert not Agreement().suspect and Agreement().at_most == 1.0
    assert not Agreement(SUSPECT_ROUNDS - 1, 0).suspect and Agreement(SUSPECT_ROUNDS, 0).suspect
    rng = np.random.default_rng(0)
    suspected = dict.fromkeys((0.02, 0.3), 0)
    for share in suspected:
        for _ in range(200):
            agreement = Agreement()
            for agreed in rng.random(256) < share:
                agreement.add(bool(agreed))
                if agreement.suspect:
                    suspected[share] += 1
                    break
    assert suspected[0.02] > 190 and suspected[0.3] == 0


def test_an_old_suspicion_can_be_outlived() -> None:
    agreement = Agreement()
    for _ in range(8 * FORGET_ROUNDS):
        agreement.add(False)
    assert agreement.suspect and "only 0 of " in agreement.problem()
    rounds = 0
    while agreement.suspect:
        agreement.add(True)
        rounds += 1
    assert rounds < FORGET_ROUNDS * SUSPECT_BELOW


@pytest.mark.parametrize("kind", ["head", "good", "ngram"])
async def test_the_target_tells_of_a_head_that_does_not_fit(kind: str, head: Path, tiny_folder: Path,
                                                            tiny_draft_folder: Path) -> None:
    names = {"head": ("eagle3", head), "good": ("standalone", tiny_draft_folder), "ngram": ("ngram", Path())}
    name, model = names[kind]
    with capture_logs() as logs:
        async with (target(tiny_folder) as rig, drafting(drafter(name, tiny_folder, model)) as peers,
                    local_link(rig, peers) as link):
            ask = Request("1", tuple(TEXT), Sampling(temperature=1.0), 60)
            await asyncio.gather(*(rig.answer(replace(ask, sampling=Sampling(temperature=1.0, seed=seed)))
                                   for seed in range(6)))
            suspect = rig.count("pairing_suspect")
            problem = rig.worker.following.pool.with_problem(DraftStatus(link.address, True)).problem
            assert rig.count("drafts_total") > SUSPECT_ROUNDS or kind == "ngram"
    warnings = [log for log in logs if log["log_level"] == "warning" and "SUSPECT" in log["event"]]
    if kind == "head":
        assert len(warnings) == 1 and warnings[0]["drafter"] == "eagle3"
        assert suspect == 1 and "check draft.model" in problem
    else:
        assert not warnings and suspect == 0 and not problem


@pytest.mark.parametrize("kind", ["head", "good"])
async def test_a_launch_asks_until_the_target_has_judged(kind: str, head: Path, tiny_folder: Path,
                                                        tiny_draft_folder: Path) -> None:
    name, model = ("eagle3", head) if kind == "head" else ("standalone", tiny_draft_folder)
    async with (target(tiny_folder, STUBBORN) as rig, drafting(drafter(name, tiny_folder, model)) as peers,
                local_link(rig, peers) as link):
        served = ServedModel("tiny", rig.hello.vocab_size, rig.hello.max_context, rig.hello.tokenizer_hash, 2048,
                        IDENTITY)
        service = TargetService(rig.worker, served)
        service.drafts = lambda: [DraftStatus(link.address, True)]
        server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(service)])
        listen = f"127.0.0.1:{await server.start()}"
        problem = await pairing_problem(Config.model_validate({"model": {"path": str(tiny_folder)},
                                                               "target": {"listen": listen}}))
        await server.drain(0.1)
        assert ("check draft.model" in problem) == (kind == "head"), problem
        if kind == "good":
            # An answer that ends inside of a round has its last token counted as no draft token's.
            num_accepted = rig.count("accepted_tokens_total")
            assert ENOUGH_ACCEPTED / 2 < num_accepted < 2 * ENOUGH_ACCEPTED, "a few rounds suffice"


@pytest.mark.parametrize(("draft", "told"), [
    (DraftStatus("d", True, "ngram"), ""),
    (DraftStatus("d", False, "", "refused: vocab_size: draft 300, target 260"),
     "the target goes without its draft, refused: vocab_size: draft 300, target 260"),
    (DraftStatus("d", False, "", "d: UNAVAILABLE"), "the target has not found its draft yet")])
async def test_a_launch_waits_for_a_draft_until_the_target_says_why_not(
        draft: DraftStatus, told: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if draft.connected or draft.given_up:
        patience_s = FIND_DRAFT_S
    else:
        monkeypatch.setattr("slipstream.cli.host.FIND_DRAFT_S", patience_s := 0.3)
    async with target(tiny_folder, STUBBORN) as rig:
        served = ServedModel("tiny", rig.hello.vocab_size, rig.hello.max_context, rig.hello.tokenizer_hash, 2048,
                             IDENTITY)
        service = TargetService(rig.worker, served)
        service.drafts = lambda: [draft]
        server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(service)])
        listen, began_s = f"127.0.0.1:{await server.start()}", monotonic()
        assert await draft_missing(Config.model_validate({"target": {"listen": listen}})) == told
        took_s = monotonic() - began_s
        await server.drain(0.1)
    assert took_s < FIND_DRAFT_S / 2 and (took_s >= patience_s) == told.endswith("yet")


def test_the_log_of_a_target_without_its_draft_is_named_in_one_piece(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that a narrow terminal breaks into lines cannot be copied, or searched for in a log."""
    async def missing(_config: Config) -> str:
        return "the target has not found its draft yet"

    monkeypatch.setattr("slipstream.cli.host.draft_missing", missing)
    out = StringIO()
    look_at_draft(Launch(Config(), tmp_path), Console(file=out, width=40), lambda line: None)
    assert len(out.getvalue().splitlines()) == 1 and f"(see {tmp_path / 'target.log'})" in out.getvalue()


async def test_a_launch_that_has_looked_at_its_draft_leaves_no_connection(tiny_folder: Path, tmp_path: Path) -> None:
    """The target closed it a minute later, and gRPC wrote of that into the terminal."""
    async with target(tiny_folder, STUBBORN) as rig:
        served = ServedModel("tiny", rig.hello.vocab_size, rig.hello.max_context, rig.hello.tokenizer_hash, 2048,
                             IDENTITY)
        server = GrpcServer("127.0.0.1:0", WIRE, [TargetServicer(TargetService(rig.worker, served))])
        port = await server.start()
        launch = Launch(Config.model_validate({"model": {"path": str(tiny_folder)},
                                               "target": {"listen": f"127.0.0.1:{port}"}}), tmp_path)

        def num_open() -> int:
            return sum(bool(one.raddr) and one.raddr.port == port and one.status == "ESTABLISHED"
                       for one in psutil.Process().net_connections("tcp"))

        seen = list[int]()
        gc.disable()
        try:
            await asyncio.to_thread(look_at_draft, launch, Console(), lambda line: seen.append(num_open()))
            async with asyncio.timeout(30):  # the target closes it after 60 s
                await eventually(lambda: not num_open())
        finally:
            gc.enable()
        await server.drain(0.1)
    assert len(seen) == 2 and seen[1] == 1


async def test_one_process_tells_of_its_pair_as_several_do(tiny_folder: Path) -> None:
    """No draft was expected there, so SlipstreamDraftDown could not fire; and the draft saw no target."""
    target_page, draft_page = free_port(), free_port()
    config = Config.model_validate({
        "model": {"path": str(tiny_folder), "dtype": "float32"},
        "draft": {"drafter": "ngram", "metrics_listen": f"127.0.0.1:{draft_page}"},
        "target": {"slots": 2048, "metrics_listen": f"127.0.0.1:{target_page}"},
        "router": {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}})
    stop, up = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(colocated.serve(config, stop, up.set))
    try:
        await asyncio.wait([serving, asyncio.create_task(up.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert await scraped(target_page, "drafts_expected") == 1
        assert await scraped(draft_page, "targets_connected") == 1
    finally:
        stop.set()
        await serving


@pytest.mark.parametrize("kind", ["head", "good", "misfit"])
def test_the_doctor_tries_the_pair(kind: str, head: Path, tiny_folder: Path, tiny_draft_folder: Path,
                                   tmp_path: Path) -> None:
    if kind == "misfit":
        head = write_eagle_folder(tmp_path / "misfit", eagle_config(target_hidden_size=64))
    draft = {"drafter": "standalone" if kind == "good" else "eagle3", "dtype": "float32",
             "model": str(tiny_draft_folder if kind == "good" else head), "growth": GROWTH.model_dump()}
    config = Config.model_validate({"model": {"path": str(tiny_folder), "dtype": "float32"}, "draft": draft})
    (pairing,) = [check for check in checks(config) if check.name == "pairing"]
    assert pairing.status == {"head": "warn", "good": "ok", "misfit": "fail"}[kind], pairing
    if kind == "good":
        assert "acceptance length" in pairing.found


@pytest.mark.parametrize("made", ["nobody says", "these weights", "other weights"])
async def test_a_head_that_was_made_for_other_weights_drafts_and_both_sides_say_so(
        made: str, head: Path, tiny_folder: Path, tmp_path: Path) -> None:
    weights = {"nobody says": "", "these weights": weights_hash(tiny_folder), "other weights": "0" * 64}[made]
    folder = Path(shutil.copytree(head, tmp_path / "head"))
    if weights:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {MADE_FOR: weights}))
    with capture_logs() as logs:
        async with (target(tiny_folder, STUBBORN) as rig,
                    drafting(drafter("eagle3", tiny_folder, folder), made_for=made_for(folder)) as peers,
                    grpc_link(rig, peers) as link):
            status = rig.worker.following.pool.with_problem(link.status())
            assert status.connected and ("other weights" in status.problem) == (made == "other weights")
            await rig.answer(Request("1", tuple(TEXT), Sampling(), 20))
            assert rig.count("drafts_total"), "it drafts in any case"
    said = [log["event"] for log in logs if log["log_level"] == "warning" and "other weights" in log.get("problem", "")]
    assert sorted(said) == (["doubtful pair", "draft link up"] if made == "other weights" else [])
