"""Tokens that are renewed while they are read, and tokens and headers that gRPC does not take."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.waiting import until

from sonic_coffea import errors
from sonic_coffea.pool import Settings
from sonic_coffea.transport import ConnectionOptions, TokenFile, connect_transport

if TYPE_CHECKING:
    from collections.abc import Callable


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
    token = TokenFile(path)
    assert token() == "first"
    happens(path)
    assert [token(), token()] == ["first", "first"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the token that it had is used" in record.message
    assert "first" not in record.message
    path.write_text("second")
    assert token() == "second"


@pytest.mark.parametrize("happens", [emptied, removed, garbled])
def test_a_file_without_a_token_yet_is_waited_for(
    tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    path = tmp_path / "token"
    path.write_text("")
    happens(path)
    tokens: list[str] = []
    token = TokenFile(path, renewed_within_s=60.0)
    reading = threading.Thread(target=lambda: tokens.append(token()))
    reading.start()
    path.write_text("late")
    until(lambda: tokens == ["late"])
    reading.join()


def test_a_file_that_never_has_a_token_is_named(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(
        errors.ConfigError, match="token file '.*token' on .*: No such file"
    ) as caught:
        TokenFile(path, renewed_within_s=0.0)()
    assert caught.value.__cause__ is None
    path.write_text(" \n")
    with pytest.raises(errors.ConfigError, match="token file '.*token' on .*: it is empty"):
        TokenFile(path, renewed_within_s=0.0)()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": ""}, "the token has no characters, expected a token"),
        ({"token": "hush ä"}, "such as a line break, that no token has"),
        ({"token": "hush\n"}, "such as a line break, that no token has"),
        ({"token_file": 5}, "token_file: expected a path, got int"),
        ({"token_file": ""}, "token_file: expected a path, got str"),
        ({"headers": {"a": 1}}, "headers: expected str for 'a', got int"),
        ({"headers": {"a": None}}, "headers: expected str for 'a', got NoneType"),
        ({"headers": {1: "hush"}}, "headers: expected names of letters, .* got 1"),
        ({"headers": {"a b": "hush"}}, "headers: expected names of letters, .* got 'a b'"),
        ({"headers": {":path": "hush"}}, "headers: expected names of letters, .* got ':path'"),
        ({"headers": {"a": "hush\n"}}, "headers: the value of 'a' has characters"),
        ({"headers": {"a-bin": "hush"}}, "headers: expected bytes for 'a-bin', got str"),
    ],
)
def test_what_grpc_does_not_take_is_refused_before(
    options: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """By `connect`, rather than by lines of C++ in the terminal at the first call."""
    with pytest.raises(errors.ConfigError, match=message) as caught:
        Settings.make("grpc://s:1", **options)
    assert "hush" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("token", ["hush ä", b"hush", "", Path("hush")])
def test_a_function_whose_token_grpc_does_not_take(
    token: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    connection = connect_transport(
        "grpc://127.0.0.1:9", options=ConnectionOptions(token=lambda: token)
    )
    with pytest.raises(
        errors.ConfigError, match="the function that token= names returned"
    ) as caught:
        connection.info()
    assert "hush" not in str(caught.value)
    assert capfd.readouterr() == ("", "")
    connection.close()


def test_binary_headers_are_taken() -> None:
    assert Settings.make("grpc://s:1", headers={"a-bin": b"\xff", "B": "x"}).headers["B"] == "x"
