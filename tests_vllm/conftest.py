"""Where the environment with vLLM is."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm", default="", help="the environment that `make vllm` made")


@pytest.fixture(scope="session")
def vllm_python(request: pytest.FixtureRequest) -> Path:
    python = Path(request.config.getoption("--vllm")) / "bin" / "python"
    if not python.is_file():
        pytest.skip("no environment with vLLM: run `make test-vllm`")
    return python
