"""``python -m deploy``: print what chart and pages take from the code; ``make docs``; a test keeps it in step."""

from __future__ import annotations

from pathlib import Path

import yaml

from deploy import manual
from deploy.alerts import rules_yaml
from deploy.dashboards import BOARDS
from deploy.schema import schema_json, values_yaml
from slipstream.base.config import Config, config_yaml
from slipstream.models.folder import KNOWN

CHART = Path("deploy/helm/slipstream")


def pages() -> dict[Path, str]:
    """The generated files, by their path from the checkout's root, as they should be."""
    files = {
        CHART / "values.yaml": values_yaml(),
        CHART / "values.schema.json": schema_json(),
        CHART / "files/defaults.yaml": config_yaml(Config()),
        CHART / "files/models.yaml": yaml.safe_dump(list(KNOWN)),
        CHART / "files/alerts.yaml": rules_yaml(),
    }
    return files | {CHART / f"files/dashboards/{board.name}.json": board.json() for board in BOARDS}


if __name__ == "__main__":
    for path, text in {**pages(), **manual.pages()}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
