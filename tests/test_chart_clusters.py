"""The chart where a cluster asks for more: its own ways to Prometheus, quotas, rights, devices."""

from __future__ import annotations

from tests.kube import only, rendered

KEDA = ("--set", "target.autoscaling.keda.enabled=true", "--set",
        "target.autoscaling.keda.serverAddress=https://thanos-querier.openshift-monitoring.svc:9092")


def test_keda_may_show_prometheus_who_it_is() -> None:
    """OpenShift's Prometheus, and those that are rented, answer nobody without a token."""
    for trigger in only(rendered("h100", *KEDA), "ScaledObject")["spec"]["triggers"]:
        assert "authenticationRef" not in trigger
    given = ("target.autoscaling.keda.authenticationRef.name=thanos",
             "target.autoscaling.keda.triggerMetadata.authModes=bearer")
    triggers = only(rendered("h100", *KEDA, *(word for one in given for word in ("--set", one))),
                    "ScaledObject")["spec"]["triggers"]
    for trigger, state in zip(triggers, ("running", "waiting"), strict=True):
        assert trigger["authenticationRef"] == {"name": "thanos"}
        query = ('sum(slipstream_sessions{service="target",state="STATE",namespace="ns",pod=~"r-slipstream-target-.*"})'
                 .replace("STATE", state))
        assert trigger["metadata"] == {
            "authModes": "bearer", "ignoreNullValues": "false", "query": query,
            "serverAddress": "https://thanos-querier.openshift-monitoring.svc:9092",
            "threshold": trigger["metadata"]["threshold"]}
