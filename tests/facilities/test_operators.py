"""The proxies' settings, the dashboard and the alerts that operators copy work."""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import certifi
import pytest
import trustme
import yaml
from tests.network.processes import Service, accepts, answers, needs, page, program
from tests.network.proxies import envoy
from tests.network.tritons import Triton, restore, tritons
from tests.ports import held_port
from tests.scored import same_scores
from tests.transport.shared import write_certificate
from tests.waiting import until

import sonic_coffea as sonic

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parents[2] / "examples" / "facilities"
DASHBOARD = json.loads((EXAMPLES / "grafana.json").read_text())
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
# Of what machines without a GPU do not have.
OF_GPUS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes"}

OF_MODEL = "model", "tagger"
OF_CLUSTER = "envoy_cluster_name", "tritons"
OF_LISTENER = "envoy_http_conn_manager_prefix", "triton"
# What each alert is about: a label of its series, and their values, minute by minute.
FAULTS = {
    "RequestsFail": (
        OF_MODEL,
        {"nv_inference_request_failure": "0+2x40", "nv_inference_request_success": "0+100x40"},
    ),
    "MoreServersWouldHelp": (
        OF_MODEL,
        {
            "nv_inference_request_duration_us": "0+500x40",
            "nv_inference_compute_infer_duration_us": "0+100x40",
        },
    ),
    "ServerIsLost": (
        OF_CLUSTER,
        {"envoy_cluster_membership_healthy": "1x40", "envoy_cluster_membership_total": "2x40"},
    ),
    "CircuitBreakerOpens": (OF_CLUSTER, {"envoy_cluster_upstream_rq_pending_overflow": "0+1x40"}),
    "RouteTimesOut": (OF_CLUSTER, {"envoy_cluster_upstream_rq_timeout": "0+1x40"}),
    "ConnectionsClosedForResets": (
        OF_LISTENER,
        {"envoy_http_downstream_rq_too_many_premature_resets": "0+1x40"},
    ),
}


@pytest.fixture(scope="module")
def metrics_port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture(scope="module")
def triton(
    repository: Path, installation: Any, tmp_path_factory: pytest.TempPathFactory, metrics_port: int
) -> Iterator[Triton]:
    arguments = ["--allow-metrics=true", "--metrics-address=127.0.0.1"]
    arguments.append(f"--metrics-port={metrics_port}")
    folder = tmp_path_factory.mktemp("triton")
    with tritons(repository, folder, 1, arguments=arguments) as (running,):
        restore([running])
        yield running


@contextlib.contextmanager
def proxy(name: str, triton: Triton, folder: Path, argv: list[Any]) -> Iterator[tuple[int, int]]:
    """Run a proxy with its example, whose addresses are those of the tests; yield its ports."""
    with held_port() as port, held_port() as admin_port:
        text = (EXAMPLES / name).read_text()
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {folder};" for kind in kinds)
        for pattern, here in (
            (r"gpu\d.example|0.0.0.0", "127.0.0.1"),
            (r"127.0.0.1(, port_value: |:)8001", rf"127.0.0.1\g<1>{triton.port}"),
            ("port_value: 9901", f"port_value: {admin_port}"),
            # nginx writes to a folder of the test alone.
            (r"http \{\n", f"http {{\naccess_log off;{temporary}\n"),
            ("listen 8001", f"listen 127.0.0.1:{admin_port}"),
            ("listen 443", f"listen 127.0.0.1:{port}"),
            ("/etc/nginx", str(folder)),
        ):
            text = re.sub(pattern, here, text)
        # The first of Envoy's is the listener.
        text = text.replace(f"port_value: {triton.port}", f"port_value: {port}", 1)
        log, settings = folder / f"{name}.log", (folder / name, text)
        with Service(argv, log, lambda: accepts(port), settings=settings):
            yield port, admin_port


def score(port: int, tagger: sonic.Model, jets: Any, **tls: str) -> Any:
    scheme = "grpcs" if tls else "grpc"
    with sonic.connect(f"{scheme}://127.0.0.1:{port}", **tls) as pool:
        return tagger(jets, pool=pool).top


@pytest.fixture(scope="module")
def through_envoy(
    triton: Triton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, int]]:
    with proxy("envoy.yaml", triton, tmp_path_factory.mktemp("envoy"), envoy(1)) as ports:
        yield ports


def test_scores_pass_the_envoy_of_the_example(
    through_envoy: tuple[int, int], tagger: sonic.Model, jets: Any, direct: Any
) -> None:
    same_scores(score(through_envoy[0], tagger, jets), direct)


@needs("nginx")
def test_scores_pass_the_nginx_of_the_example(
    triton: Triton, tmp_path: Path, tagger: sonic.Model, jets: Any, direct: Any
) -> None:
    root = trustme.CA()
    root.cert_pem.write_to_path(tmp_path / "root.pem")
    write_certificate(tmp_path, root.issue_cert("127.0.0.1"), "triton")
    options = f"daemon off; master_process off; pid {tmp_path}/nginx.pid;"
    argv = [program("nginx"), "-e", tmp_path / "error.log", "-p", tmp_path, "-g", options, "-c"]
    with proxy("nginx.conf", triton, tmp_path, argv) as (secure_port, port):
        same_scores(score(port, tagger, jets), direct)
        same_scores(score(secure_port, tagger, jets, tls_root=str(tmp_path / "root.pem")), direct)
        with pytest.raises(sonic.errors.AccessError, match="certificate"):
            score(secure_port, tagger, jets, tls_root=certifi.where())


@contextlib.contextmanager
def prometheus(ports: Iterable[tuple[int, str]], folder: Path) -> Iterator[Callable[..., Any]]:
    """Scrape ports and paths; yield what asks Prometheus for what is below /api/v1."""
    jobs = [
        {
            "job_name": str(port),
            "metrics_path": path,
            "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
        }
        for port, path in ports
    ]
    every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    loaded = {"global": every, "rule_files": [str(EXAMPLES / "alerts.yaml")]}
    settings = folder / "prometheus.yml", yaml.safe_dump({**loaded, "scrape_configs": jobs})
    with held_port() as port:
        url, data = f"http://127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"
        argv = [program("prometheus"), data, f"--web.listen-address=127.0.0.1:{port}"]

        def ask(path: str, **parameters: str) -> Any:
            return json.loads(page(f"{url}/api/v1/{path}?{urlencode(parameters)}"))["data"]

        ready = partial(answers, f"{url}/-/ready")
        with Service([*argv, "--config.file"], folder / "log", ready, settings=settings):
            yield ask


@needs("prometheus", "promtool")
def test_prometheus_answers_every_query(
    metrics_port: int,
    through_envoy: tuple[int, int],
    tagger: sonic.Model,
    jets: Any,
    tmp_path: Path,
) -> None:
    port, admin_port = through_envoy
    targets = [(metrics_port, "/metrics"), (admin_port, "/stats/prometheus")]
    queries = [
        target["expr"].replace("$model", ".*").replace("$__rate_interval", "5m")
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    ]
    with prometheus(targets, tmp_path) as ask:

        def values(expression: str) -> list[float]:
            series = ask("query", query=expression)["result"]
            return [float(one["value"][1]) for one in series]

        # What is counted between two scrapes is seen.
        until(lambda: values("count(sum_over_time(up[5m]) >= 2)") == [2], what="two scrapes")
        score(port, tagger, jets)
        until(
            lambda: (
                values("sum(increase(nv_inference_count[5m])) > 0") != []
                and all(math.isfinite(value) for query in queries for value in values(query))
            ),
            what="a scrape after the requests",
        )
        assert {query for query in queries if not values(query)} == OF_GPUS
        (variable,) = (v for v in DASHBOARD["templating"]["list"] if v["type"] == "query")
        metric, label = re.findall(r"\w+", variable["query"])[1:]
        assert ask(f"label/{label}/values", **{"match[]": metric}) == ["tagger"]
        for name, rule in ALERTS.items():
            # Quiet, as all is well, and not as there were nothing to compare.
            compared, signs = re.subn(r" ([<>]) ", r" \1 bool ", rule["expr"])
            assert signs == 1
            # Whether more servers would help, so few requests decide by chance.
            quiet = [{0.0}, {1.0}] if name == "MoreServersWouldHelp" else [{0.0}]
            until(lambda c=compared, q=quiet: set(values(c)) in q, what=f"quiet of {name}")


@needs("prometheus", "promtool")
def test_alerts_fire_half_an_hour_after_their_fault(tmp_path: Path) -> None:
    cases = []
    for name, rule in ALERTS.items():
        (label, named), series = FAULTS[name]
        summary = rule["annotations"]["summary"].replace(f"{{{{ $labels.{label} }}}}", named)
        fired = {"exp_labels": {label: named}, "exp_annotations": {"summary": summary}}
        inputs = [
            {"series": f'{metric}{{{label}="{named}"}}', "values": values}
            for metric, values in series.items()
        ]
        test = {"eval_time": "30m", "alertname": name, "exp_alerts": [fired]}
        quiet = {"eval_time": "1m", "alertname": name, "exp_alerts": []}
        cases.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [quiet, test]})
    tests = tmp_path / "tests.yaml"
    rules = [str(EXAMPLES / "alerts.yaml")]
    tests.write_text(yaml.safe_dump({"rule_files": rules, "tests": cases}))
    argv = [str(program("promtool")), "test", "rules", str(tests)]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
