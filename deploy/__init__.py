"""How Slipstream is put into a cluster: the chart's values, its schema, dashboards and alerts, printed from code."""
