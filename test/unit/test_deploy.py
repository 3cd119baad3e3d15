"""Examples for containers name what exists: flags, variables, files, metrics."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml
from sglang.srt.observability import metrics_collector
from sglang.srt.server_args import ServerArgs

from sglang_oscar import SGLANG_VERSIONS, metrics
from sglang_oscar.attach import releases
from sglang_oscar.settings import Settings
from support.server_answers import INT2

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
POD = next(found for found in KUBERNETES if found["kind"] == "Deployment")["spec"]["template"]["spec"]
DASHBOARD = json.loads((DEPLOY / "grafana" / "oscar.json").read_text())
COMMANDS = {
    "compose": COMPOSE["services"]["serve"]["command"].split(),
    "kubernetes": [*POD["containers"][0]["command"], *POD["containers"][0]["args"]],
}
VARIABLES = {
    "compose": COMPOSE["services"]["serve"]["environment"],
    "kubernetes": {entry["name"]: entry["value"] for entry in POD["containers"][0]["env"]},
}


@pytest.mark.parametrize("where", COMMANDS)
def test_servers(where: str) -> None:
    command, variables = COMMANDS[where], VARIABLES[where]
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    flags = {word.partition("=")[0] for word in command if word.startswith("--")}
    assert flags >= {"--kv-cache-dtype", "--enable-metrics"}
    assert {flag[2:].replace("-", "_") for flag in flags} <= set(releases.field_defaults(ServerArgs))
    ours = {name: value for name, value in variables.items() if name.startswith("SGLANG_OSCAR_")}
    assert Settings.from_env(ours).rotations == "/rotations"


def test_rotations_are_mounted() -> None:
    assert any(":/rotations:ro" in volume for volume in COMPOSE["services"]["serve"]["volumes"])
    for container in POD["initContainers"] + POD["containers"]:
        assert "/rotations" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_image() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert [step for step, _ in steps] == ["ARG", "FROM", "COPY", "RUN", "EXPOSE", "CMD"]
    told = dict(steps)
    assert re.fullmatch(r"SGLANG_IMAGE=lmsysorg/sglang:v[0-9.]+", told["ARG"])
    assert told["ARG"].endswith(f":v{SGLANG_VERSIONS[-1]}")
    assert "--no-deps /tmp/wheels/*.whl" in told["RUN"]
    sent = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()[1:]
    assert sent == ["*", "!dist/*.whl"]  # not an environment of gigabytes
    module, function = re.search(r"from (\S+) import (\w+)", told["RUN"]).groups()
    assert getattr(importlib.import_module(module), function)() is None


def test_compose() -> None:
    services = COMPOSE["services"]
    for service in services.values():
        for volume in service["volumes"]:
            place = volume.split(":")[0]
            if place.startswith("./"):
                assert (DEPLOY / place).is_file(), place
            else:
                assert place in COMPOSE["volumes"] or place.startswith("${"), place
    assert all(re.search(r":v?\d", services[name]["image"]) for name in ("prometheus", "grafana"))
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["serve:30000"]
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


def test_kubernetes() -> None:
    kinds = {found["kind"]: found for found in KUBERNETES}
    assert set(kinds) == {"PersistentVolumeClaim", "Deployment", "Service"}
    volumes = {volume["name"] for volume in POD["volumes"]}
    for container in POD["initContainers"] + POD["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    claim = next(volume for volume in POD["volumes"] if "persistentVolumeClaim" in volume)
    assert claim["persistentVolumeClaim"]["claimName"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def our_metrics(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names that int2 mode publishes."""
    registry = prometheus_client.CollectorRegistry()
    made: dict[str, Any] = {}
    for kind in ("Counter", "Gauge"):
        stock = getattr(prometheus_client, kind)
        monkeypatch.setattr(
            prometheus_client, kind, lambda *args, stock=stock, **named: stock(*args, registry=registry, **named)
        )
    monkeypatch.setattr(metrics, "_metrics", made)
    monkeypatch.setattr(metrics, "_labels", {"model_name": "m"})
    metrics.publish(INT2)
    samples = {sample.name for metric in registry.collect() for sample in metric.samples}
    return {name for name in samples if not name.endswith("_created")}


def test_the_dashboard_asks_for_metrics_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of ours, and of SGLang's those that its collectors name."""
    text = " ".join(expressions())
    asked = {name.removesuffix("_bucket") for name in re.findall(r"sglang:\w+", text)}
    ours = our_metrics(monkeypatch)
    assert {name for name in asked if name.startswith(metrics.PREFIX)} == ours
    stock = set(re.findall(r"\"(sglang:\w+)\"", inspect.getsource(metrics_collector)))
    assert len(stock) > 50
    assert asked - ours <= stock


def test_the_dashboard_can_be_imported() -> None:
    assert {"title", "uid", "panels", "templating", "schemaVersion"} <= set(DASHBOARD)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) <= variables
    assert all(expression.count("(") == expression.count(")") for expression in expressions())
