"""Fixtures that several test files share."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import structlog
import torch

from tests.tiny import with_template, write_tiny_model

torch.set_num_threads(1)
# Modules that take longest begin first, or a process would be left alone with one of them at the end.
LONGEST = ("test_lossless", "test_cli", "test_same_drafts", "test_ranks", "test_simulation", "test_lifecycle",
           "test_chaos", "test_train", "test_machine_code", "test_real", "test_constrained", "test_bad_drafts",
           "test_chart", "test_reaching", "test_peers", "test_gpu", "test_compiled", "test_timed", "test_sampling",
           "test_connections", "test_tune", "test_policy", "test_grammars", "test_crash_families", "test_lenient",
           "test_int8", "test_device_races", "test_drafters", "test_fused", "test_scoring", "test_vllm_sampling",
           "test_mtp_lossless", "test_families", "test_models", "test_mtp", "test_wheel")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests of what a device computes run: cpu, cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Function) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the event loop of services, but for modules that set a loop's clock."""
    if {"still", "hurried"} & vars(item.module).keys():
        return {"asyncio": asyncio.new_event_loop}
    import uvloop  # tests of devices run where there is none

    return {"uvloop": uvloop.new_event_loop}


def pytest_collectstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What all modules of tests import stays, and the collector need not go through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A service sets torch's threads for its whole process, which is its own: the next test's is not."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """A service configures the logs of its whole process, too."""
    root, was_configured = logging.getLogger(), structlog.is_configured()
    handlers, level = root.handlers, root.level
    yield
    if not was_configured:
        structlog.reset_defaults()
        root.handlers, root.level = handlers, level


@pytest.fixture(scope="module")
async def servers_end() -> AsyncIterator[None]:
    """All servers of a module's tests are stopped at its end, those of a test that failed, too: while grpc collects one
    that nobody has stopped, it waits for calls that never end, and some test of another module hangs."""
    from slipstream.wire.server import GrpcServer  # tests of devices run where there is no grpc

    begun, start = list[GrpcServer](), GrpcServer.start

    async def started(server: GrpcServer) -> int:
        begun.append(server)
        return await start(server)

    with patch.object(GrpcServer, "start", started):
        yield
    for server in begun:
        await server.drain(0)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Llama target."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture
def thinking_folder(tmp_path: Path, tiny_folder: Path) -> Path:
    """A model whose template begins its reasoning."""
    folder = with_template(
        "{{ messages[0].content }}{% if enable_thinking | default(true) %}"
        "<think>\n{% else %}<think>\n\n</think>{% endif %}",
        tiny_folder, tmp_path / "thinks")
    return folder


@pytest.fixture(scope="session")
def tiny_draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for it: the same weights with a little noise."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "draft", noise=0.05)
