"""Three Grafana dashboards, written as code and printed as JSON."""

from deploy.dashboards import overview, speculation, transport

BOARDS = tuple(module.BOARD for module in (overview, speculation, transport))
