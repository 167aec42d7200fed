"""Runs pip, which says itself what goes wrong. It knows nothing about what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def pip(*arguments: str, variables: Mapping[str, str] | None = None) -> None:
    """Run pip with ``arguments``. variables: of the environment, besides ours. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True,
                   env=os.environ | dict(variables or {}))
