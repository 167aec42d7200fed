"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import write_tiny_model

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests of what a device computes run: cpu, cuda")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Llama target."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for it: the same weights with a little noise."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "draft", noise=0.05)
