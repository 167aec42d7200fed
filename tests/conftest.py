"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import write_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny Llama target."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for it: the same weights with a little noise."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "draft", noise=0.05)
