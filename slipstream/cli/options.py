"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slipstream.base.errors import Unavailable

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings.")]
Overrides = Annotated[list[str] | None, typer.Option(
    "--set", metavar="SECTION.KEY=VALUE", help="Change one setting; may be repeated. `slipstream config` lists them.")]


def key_in(file: Path | None) -> str:
    """The API key in a file's first line; "" without a file. Raises Unavailable."""
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise Unavailable(f"cannot read the key: {error}") from error
