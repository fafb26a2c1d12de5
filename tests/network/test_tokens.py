"""Tokens that stay expired are named, behind a real Envoy."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.network.proxies import signed_tokens
from tests.network.tritons import Triton

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings

_KEY = b"a key of tests, of 32 characters"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


JWKS = {"keys": [{"kty": "oct", "alg": "HS256", "kid": "1", "k": _encoded(_KEY)}]}


def expired_token() -> str:
    """Return a token that expired longer ago than Envoy allows for, which is 60 s."""
    header = {"alg": "HS256", "typ": "JWT", "kid": "1"}
    payload = {"iss": "tests", "exp": int(time.time() - 100)}
    signed = ".".join(_encoded(json.dumps(part).encode()) for part in (header, payload))
    return f"{signed}.{_encoded(hmac.digest(_KEY, signed.encode(), hashlib.sha256))}"


def test_tokens_that_stay_expired_are_named(
    two_tritons: list[Triton], proxy: Any, tagger: sonic.Model, jets: Any, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_text(expired_token())
    with proxy(two_tritons, filters=[signed_tokens(JWKS)]) as running:
        settings = Settings.make(running.url, token_file=path, retry_timeout_s=0.5)
        with Pool(settings) as pool, pytest.raises(errors.TokenExpiredError, match="Jwt is expire"):
            tagger(jets, pool=pool)
        # Nobody renews a token that was given as text.
        settings = Settings.make(running.url, token=expired_token(), retry_timeout_s=60.0)
        with Pool(settings) as pool, pytest.raises(errors.AccessError, match="token_file="):
            tagger(jets, pool=pool)
        assert pool.statistics.total().retries == 0
