"""Mutual TLS between real processes: who is let in, and certificates that are replaced under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from bench.fleet import free_port, service
from slipstream.cli.process import http_ok
from slipstream.wire.tls import FILE_NAMES as NAMES_OF_FILES
from slipstream.wire.tls import TlsFiles
from tests.certificates import authority, issue, laid, needs_openssl, replace_files
from tests.scraped import scraped
from tests.tiny import write_tiny_model
from tests_k8s.fleet import Fleet, asking, fleet

pytestmark = [pytest.mark.timeout(1800), needs_openssl]
NAME = "services.ns.svc"
FILE_NAMES = f"IP:127.0.0.1,DNS:{NAME}"


def shown(folder: Path | None) -> list[str]:
    """Settings of a process that shows what is in it."""
    if folder is None:
        return []
    return [f"wire.tls.folder={folder}", f"wire.tls.allowed_names=['{NAME}']"]


@asynccontextmanager
async def peer(services: Fleet, model: Path, certificates: Path | None,
               folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """One more router at the same target, once it has asked it. Yields the status of its health, and its log."""
    process = service("router", f"peer-{free_port()}", folder, (
        f"model.path={model}", f"router.targets=['127.0.0.1:{services.port('target')}']",
        f"router.grpc_listen=127.0.0.1:{free_port()}", *shown(certificates)))
    process.start()
    try:
        async with asyncio.timeout(300):
            while not await asyncio.to_thread(http_ok, process.address, "/live"):
                await asyncio.sleep(0.2)
        async with httpx.AsyncClient(timeout=60) as http:
            yield (await http.get(f"http://{process.address}/health")).status_code, process.log
    finally:
        await asyncio.to_thread(process.stop)


async def test_strangers_are_refused_and_new_certificates_taken_under_load(tmp_path: Path) -> None:
    ours, theirs, model = authority(tmp_path / "ours"), authority(tmp_path / "theirs"), write_tiny_model(tmp_path / "m")
    first, both = issue(ours, "first", FILE_NAMES), tmp_path / "both.pem"
    live = laid(first, tmp_path / "live")
    files = TlsFiles(*(live / name for name in NAMES_OF_FILES))
    both.write_bytes((ours / "ca.pem").read_bytes() + (theirs / "ca.pem").read_bytes())
    strangers = {"none": None, "expired": laid(issue(ours, "late", FILE_NAMES, days=-1), tmp_path / "late"),
                 "another name": laid(issue(ours, "other", "IP:127.0.0.1,DNS:other.ns.svc"), tmp_path / "other"),
                 "another authority": laid(replace(issue(theirs, "foreign", FILE_NAMES), authority=first.authority),
                                           tmp_path / "foreign")}
    settings = (f"model.path={model}", "router.model_name=tiny", "draft.drafter=ngram", *shown(live))
    # Of two drafts one shows a certificate that has ended: it is never spoken to.
    own = {"late": shown(strangers["expired"])}
    async with fleet(tmp_path, ("good", "late"), settings=settings, own=own) as services:
        for name in services.processes:
            await services.ready(name)
        client = AsyncOpenAI(base_url=f"{services.url}/v1", api_key="none", max_retries=0, timeout=300)
        async with asking(client, "abcabcabcabcabcabc abcabcabc") as load:
            await load.until(drafted=True)
            assert await scraped(services.processes["target"].metrics_port, "drafts_connected") == 1
            for name, stranger in strangers.items():
                async with peer(services, model, stranger, tmp_path) as (status, log):
                    print(f"{name}: {status}")
                    assert status == 503, f"{name}: {log.read_text()}"
            # As an operator does it: trust both authorities, show the new certificate, drop the old authority.
            fresh = issue(theirs, "fresh", FILE_NAMES)
            for step in (replace(first, authority=both), replace(fresh, authority=both), fresh):
                replace_files(files, step)
                await asyncio.sleep(2)  # files are looked at every second
                await load.until(drafted=True)
            for name, shows, expected in (("old", first, 503), ("new", fresh, 200)):
                certificates = laid(replace(shows, authority=both), tmp_path / name)
                async with peer(services, model, certificates, tmp_path) as (status, log):
                    assert status == expected, f"{name}: {log.read_text()}"
            services.processes["good"].stop()  # its next handshake is with new certificates alone
            services.processes["good"].start()
            await services.ready("good")
            await load.until(drafted=True)
        print(f"{len(load.answered)} answers, {len(load.failures)} failed")
        assert not load.failures, load.failures
        assert len({answer.text for answer in load.answered}) == 1, "no answer is another"
