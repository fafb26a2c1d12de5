"""A gRPC channel to a server, which certificates that are renewed or a hang replace."""

from __future__ import annotations

from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sonic_coffea.transport._address import Address
from sonic_coffea.transport._options import ConnectionOptions

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Connections of one process to one server must not share a socket behind our back.
    ("grpc.use_local_subchannel_pool", 1),
    # Notices a dead peer within a minute; servers answer faster pings with too_many_pings.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long a connection may take to be made: far servers and busy balancers need seconds.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A name may have several addresses: requests take turns among them.
    ("grpc.lb_policy_name", "round_robin"),
)


class Channel:
    """A gRPC channel and its methods; closing it cancels calls.

    Attributes
    ----------
    files : object
        `ConnectionOptions.certificate_states` of those that were read; None once the channel is to
        be replaced.
    in_flight : set
        The calls that are in flight on it.
    """

    def __init__(self, address: Address, options: ConnectionOptions, files: object) -> None:
        # Proxies of a cluster's web traffic, in the environment, lead to no inference server.
        proxy = ("grpc.http_proxy", options.proxy or "")
        arguments = [*_OPTIONS, ("grpc.enable_http_proxy", int(bool(options.proxy))), proxy]
        name = options.compression
        compression = None if name is None else grpc.Compression[name.capitalize()]
        if address.tls:
            root, cert, key = options.read_certificates()
            credentials = grpc.ssl_channel_credentials(root, key, cert)
            channel = grpc.secure_channel(address.target, credentials, arguments, compression)
        else:
            channel = grpc.insecure_channel(address.target, arguments, compression)
        self.files = files
        self.in_flight: set[Any] = set()
        self.close = channel.close
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        # Requests are serialized by `with_contents`, which saves three copies of every tensor.
        self.stub.ModelInfer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )
