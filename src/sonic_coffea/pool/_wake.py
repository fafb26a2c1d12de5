"""Wakes servers that sleep: a proxy has a server started when it is asked for the models."""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import (
    AccessError,
    CancelledError,
    DeadlineError,
    ModelNotFoundError,
    ModelNotReadyError,
    SonicError,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from sonic_coffea.pool._request import ModelKey
    from sonic_coffea.transport import Connection

logger = logging.getLogger(__name__)

# Autoscalers look at rates over 30 s or more.
INTERVAL_S = 5.0


def wake(
    connections: Sequence[Connection],
    models: Sequence[ModelKey],
    timeout_s: float,
    closing: threading.Event,
    show: Callable[[str], None],
    interval_s: float = INTERVAL_S,
) -> float:
    """Ask all servers until one is ready; return how many seconds that took.

    ``closing`` is set when the pool is closed; ``show`` takes the state of the wait. `Pool.wake`
    lists the errors.
    """
    begun = time.monotonic()
    with ThreadPoolExecutor(len(connections), thread_name_prefix="sonic-wake") as threads:
        while True:
            reasons = list(threads.map(lambda c: _ask(c, models), connections))
            failures = [reason for reason in reasons if reason is not None]
            waited_s = time.monotonic() - begun
            if len(failures) < len(reasons):
                return waited_s
            transient = [str(failure) for failure in failures if not _is_final(failure)]
            if not transient:
                raise failures[0]
            reason = transient[0]
            state = f"no server is ready after {waited_s:.0f} s of {timeout_s:g} s: {reason}"
            logger.info("%s", state)
            show(state)
            if waited_s + interval_s > timeout_s:
                error = DeadlineError(f"no server was ready within {timeout_s:g} s")
                raise error.because(reason)
            if closing.wait(interval_s):
                raise CancelledError("the pool was closed while it waited for a server")


def _is_final(failure: SonicError) -> bool:
    """Whether waiting does not help, as it does while a model is loaded."""
    missing = isinstance(failure, (AccessError, ModelNotFoundError))
    return missing and not isinstance(failure, ModelNotReadyError)


def _ask(connection: Connection, models: Sequence[ModelKey]) -> SonicError | None:
    """Return why a server is not ready; None if it is.

    The first request is for the index of its repository: proxies count these requests, and wake a
    server by the count.
    """
    where = str(connection.address)
    reason: SonicError = ModelNotReadyError("the server is not ready", server=where)
    try:
        connection.models()
    except AccessError as error:
        return error
    except SonicError as error:  # a ready server may refuse this request alone
        reason = error
    if not connection.ready():
        return reason
    try:
        for model, version in models:
            connection.contract(model, version)
    except SonicError as error:
        return error
    return None


@contextlib.contextmanager
def show_status(*, progress: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces a line of status, in terminals and notebooks."""
    if not progress:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    status: Any
    with Console(stderr=True).status("waking the servers") as status:
        yield lambda state: status.update(Text(state))
