"""The board names metrics that vLLM has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from deploy.dashboards import BOARDS

SCRIPT = """
import importlib.util, re
from pathlib import Path
room = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
print(*{name for file in (room / "v1").rglob("*.py") for name in re.findall(r'"(vllm:[a-z_]+)"', file.read_text())})
"""


def test_metrics_of_vllm_on_a_board_exist(vllm_python: Path) -> None:
    done = subprocess.run([vllm_python, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    shown = {re.sub(r"_(total|bucket)$", "", name) for board in BOARDS for panel in board.panels()
             for expression in panel.expressions() for name in re.findall(r"vllm:[a-z_]+", expression)}
    assert len(shown) > 5 and shown <= set(done.stdout.split())
