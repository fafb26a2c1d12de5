"""Tokens that are renewed while they are read, and tokens and headers that gRPC does not take."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.transport.shared import SERVED, score
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.pool import Settings
from sonic_coffea.testing import FakeServer
from sonic_coffea.transport import ConnectionOptions, Token, connect_transport


def emptied(path: Path) -> None:
    path.write_text("")


def removed(path: Path) -> None:
    path.unlink()


def garbled(path: Path) -> None:
    path.write_bytes(b"\xff")


@pytest.mark.parametrize("happens", [emptied, removed, garbled])
def test_a_file_that_is_being_renewed_leaves_the_last_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, happens: Callable[[Path], None]
) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    token = Token(path)
    assert token() == "first"
    happens(path)
    assert [token(), token()] == ["first", "first"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the token that it had is used" in record.message
    assert "first" not in record.message
    path.write_text("second")
    assert token() == "second"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b" \n", "it is empty"),
        (b"hush-\xff", "bytes that are not UTF-8"),
        (b"hush\nhush", "characters that no token has"),
        ("hush-é".encode(), "characters that no token has"),
    ],
)
def test_a_file_that_never_has_a_token_is_named_and_not_quoted(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    message = f"token file '.*token' on .*: .*{reason}"
    with pytest.raises(errors.ConfigError, match=message) as caught:
        Token(path)()
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None


def absent() -> str:
    raise KeyError("hush")


def garbage() -> str:
    return b"hush-\xff".decode()


RETURNED = "the function that token= names returned"


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (lambda: "hush ä", f"{RETURNED} characters, .* that no token has"),
        (lambda: "", f"{RETURNED} characters, .* or none"),
        (lambda: b"hush", f"{RETURNED} bytes, expected str"),
        (lambda: Path("hush"), rf"{RETURNED} \w+Path, expected str"),
        (lambda: None, f"{RETURNED} NoneType, expected str"),
        (absent, "the function that token= names failed: KeyError$"),
        (garbage, "the function that token= names failed: UnicodeDecodeError$"),
    ],
)
def test_functions_without_a_token_are_named_and_show_nothing(
    token: Any, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ConnectionOptions(token=Token(token))
    with (
        connect_transport("grpc://127.0.0.1:9", options=options) as connection,
        pytest.raises(errors.ConfigError, match=message) as caught,
    ):
        connection.info()
    assert "hush" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_tokens_and_headers_are_never_shown() -> None:
    options = ConnectionOptions(token=Token("hush"), headers={"X-Key": "hush"})
    assert "hush" not in repr(options)


def test_binary_headers_are_taken() -> None:
    assert Settings.make("grpc://s:1", headers={"a-bin": b"\xff", "B": "x"}).headers["B"] == "x"


def jwt(valid_s: float) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + valid_s}).encode())
    return f"e30.{claims.decode().rstrip('=')}.x"


@contextlib.contextmanager
def guarded(token: str) -> Iterator[FakeServer]:
    """Serve a model to whoever has the token."""
    with FakeServer(SERVED, headers={"authorization": f"Bearer {token}"}) as server:
        yield server


@pytest.mark.parametrize(("valid_s", "once"), [(None, True), (1000.0, True), (-1.0, False)])
def test_a_function_is_called_once_until_its_token_is_near_its_end(
    valid_s: float | None, once: bool
) -> None:
    token = "opaque" if valid_s is None else jwt(valid_s)
    called = []

    def fetch() -> str:
        called.append(token)
        return token

    with guarded(token) as server, sonic.connect([server.url], token=fetch) as pool:
        for _ in range(2):
            score(pool)
        assert (len(called) == 1) is once


@pytest.mark.parametrize(
    ("token", "message"), [("wrong", "token_file= reads a new one"), (lambda: "wrong", "")]
)
def test_a_token_that_no_server_ever_took_is_an_error_at_once(token: Any, message: str) -> None:
    with (
        guarded("right") as server,
        sonic.connect(server.url, token=token, retry_timeout_s=1000.0) as pool,
        pytest.raises(errors.AccessError) as caught,
    ):
        score(pool)
    assert message in str(caught.value)
    assert not isinstance(caught.value, errors.TokenExpiredError)
    assert pool.statistics.total().retries == 0


def test_a_function_that_exits_ends_its_call_only() -> None:
    """Not the thread that sends: the next call has a token."""
    exits = [False]

    def fetch() -> str:
        if exits[0]:
            raise SystemExit
        return jwt(-1.0)  # so that it is asked each time

    with FakeServer(SERVED) as server:
        with sonic.connect(server.url, token=fetch) as pool:
            score(pool)
            exits[0] = True
            score(pool)
        with (
            sonic.connect(server.url, token=fetch) as pool,
            pytest.raises(errors.ConfigError, match="token= names failed: SystemExit"),
        ):
            score(pool)


def test_a_slow_function_is_logged_while_it_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    def fetch() -> str:
        until(lambda: "takes more than 1 s" in caplog.text)
        return "slow"

    assert Token(fetch)() == "slow"


def test_a_token_that_a_server_repeats_is_not_shown(tmp_path: Path, caplog: Any) -> None:
    with FakeServer(SERVED) as server, sonic.connect(server.url, token="hush") as pool:
        server.fail(grpc.StatusCode.INTERNAL, "no such user: Bearer hush", times=100)
        with pytest.raises(errors.InferenceError, match="no such user: Bearer …") as caught:
            score(pool)
        pool.dump(tmp_path / "dump")
        shown = f"{caught.value!r} {pool._repr_html_()} {(tmp_path / 'dump').read_text()}"
    assert "hush" not in f"{shown}{caplog.text}"
