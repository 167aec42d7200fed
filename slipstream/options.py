"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file with settings.")]
Overrides = Annotated[list[str] | None, typer.Option(
    "--set", metavar="SECTION.KEY=VALUE", help="Change one setting; may be repeated. `slipstream config` lists them.")]
