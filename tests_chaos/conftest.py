"""How many histories, and from which seed on."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--histories", type=int, default=1000, help="how many are tried")
    parser.addoption("--seed", type=int, default=1, help="of the first of them")
    parser.addoption("--requests", type=int, default=24_000, help="of the soak")
