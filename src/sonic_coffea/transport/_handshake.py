"""Why a server refuses every connection: a TLS handshake of our own finds out."""

from __future__ import annotations

import socket
import ssl

from sonic_coffea.errors import AccessError, ConfigError, SonicError
from sonic_coffea.transport._address import Address
from sonic_coffea.transport._failures import NO_CERT
from sonic_coffea.transport._options import ConnectionOptions
from sonic_coffea.transport._transport import PROMPT_S

_COMPLETED = "the handshake was completed"


def refusal(address: Address, options: ConnectionOptions) -> SonicError | None:
    """Return why a server refuses each connection; None if that is not known. This may block.

    gRPC has the same words for a server that refuses a certificate, wants TLS, or is gone.
    """
    if address.path is not None or options.proxy is not None:
        return None
    context = options.ssl_context() if address.tls else ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # gRPC has verified it
    context.set_alpn_protocols(["h2"])
    reason = _shake_hands(address, context)
    if not address.tls:
        wants_tls = reason == _COMPLETED or "ALERT" in reason
        what = f"the port wants TLS; did you mean grpcs://{address.target}?"
        return ConfigError(what, server=str(address)) if wants_tls else None
    if reason == _COMPLETED:
        # In TLS 1.3, the handshake is over before the server looks at the certificate, and gRPC
        # hangs up without a word; as a proxy does whose server is lost, also in TLS 1.2.
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        reason = _shake_hands(address, context)
        refused = reason not in ("", _COMPLETED) and "VERSION" not in reason
    else:
        refused = "ALERT" in reason
    return AccessError(f"{NO_CERT}: {reason}", server=str(address)) if refused else None


def _shake_hands(address: Address, context: ssl.SSLContext) -> str:
    """Return why a TLS handshake fails, or that it is completed; empty if nothing listens."""
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, place in places:
        # Wrapped before it connects: ssl would not close one that the peer has reset by then.
        with context.wrap_socket(
            socket.socket(family, kind, protocol),
            server_hostname=address.host,
            do_handshake_on_connect=False,
        ) as wrapped:
            wrapped.settimeout(PROMPT_S)
            try:
                wrapped.connect(place)
            except OSError:
                continue
            try:
                wrapped.do_handshake()
            except OSError as error:
                return str(getattr(error, "reason", error))
            return _COMPLETED
    return ""
