"""The servers of a pool: taken in, let go, and asked which models they have."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sonic_coffea.errors import (
    ConfigError,
    ContractError,
    DeadlineError,
    ModelNotFoundError,
    OverloadError,
    RequestError,
    ServerLostError,
    SonicError,
)
from sonic_coffea.pool._discovery import ask_contract, note, serves, without_file
from sonic_coffea.pool._endpoint import Endpoint, ModelKey
from sonic_coffea.pool._fallback import RANK, check_digest
from sonic_coffea.pool._settings import read_servers
from sonic_coffea.transport import Address, connect_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from sonic_coffea.pool._deadline import Deadline
    from sonic_coffea.pool._endpoint import RttStatistics
    from sonic_coffea.pool._limits import Quota
    from sonic_coffea.pool._settings import Settings
    from sonic_coffea.transport import Contract, ModelStatistics

logger = logging.getLogger(__name__)

# How often a file of servers is looked at.
_LOOK_S = 1.0

CLOSED = "the pool has been closed; call sonic.connect again"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What a pool knows of a server at the moment."""

    url: str
    in_flight: int
    usable: bool
    last_error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """What was seen of a server: whether it is lost, and by model what is out and what came."""

    url: str
    lost: bool
    models: Mapping[ModelKey, tuple[int, RttStatistics]]


class Fleet:
    """The servers of a pool, and what is known of their models.

    Parameters
    ----------
    settings : Settings
        Which servers, and how they are connected.
    lock : Condition
        Guards what is known; notified when it changes.
    """

    def __init__(self, settings: Settings, lock: threading.Condition) -> None:
        self.settings = settings
        self.endpoints: list[Endpoint] = []
        self._lock = lock
        self._contracts: dict[ModelKey, Contract] = {}
        self._asking: dict[ModelKey, threading.Lock] = {}
        self._closed = False
        self.first_at = 0.0
        self.looks_at = math.inf if settings.servers_file is None else 0.0
        self._changed: int | None = None
        self._listed = settings.servers
        self._unreadable = ""
        self._incomparable: set[ModelKey] = set()
        self._fallback_url: str | None = None
        self._falling_back = False
        self._fell_back_at = -math.inf
        self._fallback_error: SonicError | None = None

    def open(self) -> list[Endpoint]:
        """Return the servers, with a connection to each.

        Raises
        ------
        ServerLostError
            If they have been closed.
        """
        with self._lock:
            if self._closed:
                raise ServerLostError(CLOSED)
            if not self.endpoints:
                self._take_in(self.settings)
            return [e for e in self.endpoints if not e.leaving]

    def set_servers(self, settings: Settings) -> None:
        """Take in and let go of servers; those that are let go of answer what they have.

        Raises
        ------
        SonicError
            If a server cannot be connected; all stay as they are.
        """
        with self._lock:
            if self.endpoints:
                self._take_in(settings)
            self.settings = settings
            self._lock.notify_all()

    def look(self, now: float) -> None:
        """Have the file of servers read again, if it is time, on another thread: it may hang."""
        if now >= self.looks_at:
            threading.Thread(target=self._look, name="sonic-servers", daemon=True).start()
            self.looks_at = math.inf

    def _look(self) -> None:
        path = str(self.settings.servers_file)
        try:
            changed = Path(path).stat().st_mtime_ns
            if changed != self._changed:
                servers = read_servers(path)
                if servers != self._listed:
                    self.set_servers(replace(self.settings, servers=servers))
                    logger.warning("the servers are now %s", ", ".join(servers))
                self._changed, self._listed, self._unreadable = changed, servers, ""
        except Exception as error:  # noqa: BLE001  whatever is in it, the servers go on
            # What is missing, such as a certificate, may come later: it is tried again, said once.
            if str(error) != self._unreadable:
                self._unreadable = str(error)
                logger.warning("the servers stay as they are, %s: %s", path, error)
        with self._lock:
            self.looks_at = time.monotonic() + _LOOK_S
            self._lock.notify_all()

    def _take_in(self, settings: Settings) -> None:
        urls = list(settings.servers)
        if self._fallback_url is not None:
            urls.append(self._fallback_url)
        known = {e.url for e in self.endpoints}
        new = self._connected([url for url in urls if url not in known], settings)
        # Many processes start at the same time, and must not all turn to the same server.
        random.shuffle(new)
        self.endpoints += new
        for endpoint in self.endpoints:
            endpoint.leaving = endpoint.url not in urls
            ordered = settings.balance == "priority" and not endpoint.leaving
            endpoint.rank = urls.index(endpoint.url) if ordered else 0
            if endpoint.url == self._fallback_url:
                endpoint.rank = RANK
        self.let_go()

    @staticmethod
    def _connected(urls: Sequence[str], settings: Settings) -> list[Endpoint]:
        """Return new servers with their connections: all, or none."""
        options = settings.connection_options()
        if any(url.startswith("grpcs://") for url in urls):
            options.tls.read()
        with contextlib.ExitStack() as made:
            endpoints = []
            for url in urls:
                endpoint = Endpoint(url, [], settings.limits.max_in_flight)
                made.callback(endpoint.close)
                for _ in range(settings.channels):
                    endpoint.connections.append(connect_transport(url, options=options))
                endpoints.append(endpoint)
            made.pop_all()
        return endpoints

    def let_go(self) -> None:
        """Close those that leave and owe nothing."""
        for endpoint in [e for e in self.endpoints if e.leaving and not e.out]:
            self.endpoints.remove(endpoint)
            # It may ask the server to let go of memory, and the lock is held here.
            threading.Thread(target=endpoint.close, name="sonic-leave", daemon=True).start()

    def close(self) -> None:
        """Close all."""
        with self._lock:
            self._closed = True
            endpoints, self.endpoints = self.endpoints, []
            self._lock.notify_all()
        for endpoint in endpoints:
            endpoint.close()

    def states(self) -> list[ServerState]:
        """Return what is known of each."""
        with self._lock:
            now = time.monotonic()
            return [
                ServerState(
                    url=e.url,
                    in_flight=e.out,
                    usable=e.away_until <= now,
                    last_error=str(e.last_error) if e.last_error else None,
                )
                for e in self.endpoints
                if not e.leaving
            ]

    def observe(self) -> list[EndpointReport]:
        """Return what was seen of each server since the last call."""
        with self._lock:
            return [
                EndpointReport(url=e.url, lost=e.lost, models=e.observe())
                for e in self.endpoints
                if not e.leaving
            ]

    def timings(self) -> dict[tuple[str, ModelKey], ModelStatistics]:
        """Ask the servers, those that can say, for their own account of the models in use."""
        with self._lock:
            asked = [(e, wanted) for e in self.endpoints for wanted in e.models]
        found = {}
        for endpoint, wanted in asked:
            try:
                found[endpoint.url, wanted] = endpoint.connections[0].statistics(*wanted)
            except SonicError as error:
                logger.debug("no statistics: %s", error)
        return found

    def allow(
        self,
        shares: Mapping[tuple[str, ModelKey], Quota],
        lost: Collection[str],
        lasts_s: float,
    ) -> None:
        """Take what someone who sees all clients says; see `Pool.allow`."""
        with self._lock:
            now = time.monotonic()
            for endpoint in self.endpoints:
                if endpoint.url in lost:
                    error = ServerLostError("another worker has lost it", server=endpoint.url)
                    endpoint.spare(error, now + lasts_s, now)
                else:
                    endpoint.try_again(now)
                for (url, wanted), share in shares.items():
                    if url == endpoint.url:
                        endpoint.allow(wanted, share, now)
            self._lock.notify_all()

    def serving(self, wanted: ModelKey, now: float) -> list[Endpoint]:
        """Return those that may have a model, as far as is known."""
        return [e for e in self.endpoints if not e.lacks(wanted, now)]

    def falls_back_at(self, wanted: ModelKey, now: float) -> float:
        """Return when a fallback is to be started for a model; never, if there is none to come."""
        coming = self.settings.fallback.source is not None and self._fallback_error is None
        if not coming or self._falling_back:
            return math.inf
        for fallback in (e for e in self.endpoints if e.url == self._fallback_url):
            lost_since = fallback.lost_since(now)
            # It is there, whatever it has, or it has been started again in vain.
            if lost_since is None or lost_since <= self._fell_back_at:
                return math.inf
        since = self._all_lost_since(self.serving(wanted, now), now)
        return math.inf if since is None else since + self.settings.fallback.after_s

    def waits_for_fallback(self, wanted: ModelKey, now: float) -> bool:
        """Whether rows of a model may still be scored by one."""
        return self._falling_back or self.falls_back_at(wanted, now) < math.inf

    def fall_back(self) -> None:
        """Start the fallback, or find the one of this machine, on another thread."""
        threading.Thread(target=self._start_fallback, name="sonic-fallback", daemon=True).start()
        self._falling_back = True

    def _start_fallback(self) -> None:
        given, before = self.settings.fallback.source, self._fallback_url
        try:
            if callable(given):
                url = given()
            else:
                from sonic_coffea.server.launch import serve_for_machine

                url = serve_for_machine(str(given))
            url = Address.parse(url).url
            with self._lock:
                self._fallback_url, self._fell_back_at = url, time.monotonic()
                if not self._closed:
                    self._take_in(self.settings)
            logger.warning("rows are scored by the fallback %s until a server is back", url)
        except BaseException as error:  # noqa: BLE001  a user's function, and rows that wait for it
            failure = error if isinstance(error, SonicError) else ConfigError(repr(error))
            logger.error("no fallback: %s", failure)  # noqa: TRY400  it says enough
            with self._lock:
                self._fallback_url, self._fallback_error = before, failure
        with self._lock:
            self._falling_back = False
            self._lock.notify_all()

    def lost_since(self, wanted: ModelKey, now: float) -> float | None:
        """Return since when the last server of a model is lost; None if one is there, or to come.

        It does not begin anew when coffea or dask run a chunk again.
        """
        if self.waits_for_fallback(wanted, now):
            return None
        return self._all_lost_since(self.serving(wanted, now), now)

    def _all_lost_since(self, endpoints: Iterable[Endpoint], now: float) -> float | None:
        since = [e.lost_since(now) for e in endpoints]
        lost = [s for s in since if s is not None]
        return max(lost, default=-math.inf) if len(lost) == len(since) else None

    def contract(self, wanted: ModelKey, deadline: Deadline) -> Contract:
        """Return what a model takes and gives, asked once.

        Raises
        ------
        DeadlineError
            If the time was not enough.
        SonicError
            If no server says so.
        """
        known = self._contracts.get(wanted)
        if known is not None:
            return known
        # Another model, and who has less time, does not wait for this one.
        asking = self._asking.setdefault(wanted, threading.Lock())
        left_s = deadline.left_s
        if not asking.acquire(timeout=-1 if left_s is None else left_s):
            raise _too_late(wanted, deadline)
        try:
            known = self._contracts.get(wanted)
            if known is None:
                known = self._contracts[wanted] = self._ask(wanted, deadline)
            return known
        finally:
            asking.release()

    def forget(self, wanted: ModelKey) -> None:
        """Have whoever asks next for a model ask the servers anew."""
        self._contracts.pop(wanted, None)

    def _ask(self, wanted: ModelKey, deadline: Deadline) -> Contract:
        """Ask every server; if none has the model, those that are lost are asked again."""
        with self._lock:
            self._wait(self.first_at, deadline)
        failures: list[SonicError] = []
        while not deadline.over:
            found, latest = ask_contract(self.open(), wanted, self._lock, deadline)
            if found is not None:
                return found
            # One that the deadline cut short says nothing of why the others failed.
            failures = latest or failures
            passing = any(isinstance(f, (ServerLostError, OverloadError)) for f in failures)
            with self._lock:
                now = time.monotonic()
                lost = [e for e in self.endpoints if e.lost_since(now) is not None]
                since = max((e.lost_since(now) or now for e in lost), default=-math.inf)
                falls_back = self.falls_back_at(wanted, now)
                if falls_back <= now:
                    self.fall_back()
                if self._falling_back:
                    self._lock.wait_for(
                        lambda: self._closed or not self._falling_back, deadline.left_s
                    )
                    continue
                given_up = not passing or now - since >= self.settings.retry.timeout_s
                if falls_back == math.inf and given_up and not deadline.over:
                    raise self._nobody(wanted, failures)
                self._wait(min([e.away_until for e in lost] + [falls_back]), deadline)
        raise _too_late(wanted, deadline, failures)

    def _wait(self, until: float, deadline: Deadline) -> None:
        """Wait for a time, or for the end."""
        self._lock.wait_for(lambda: self._closed, deadline.within(until - time.monotonic()))

    def _nobody(self, wanted: ModelKey, failures: Sequence[SonicError]) -> SonicError:
        """Return the error for a model that no server has."""
        model, version = wanted
        missing = [f for f in failures if isinstance(f, ModelNotFoundError)]
        error = (missing or failures)[0].at(model=model, version=version)
        if isinstance(error, ServerLostError):
            where = error.server or self.settings.servers[0]
            return error.because(f"sonic-coffea check {where} {model} tries it step by step")
        return error

    def compare(
        self,
        endpoint: Endpoint,
        known: Contract,
        wanted: ModelKey,
        done: Callable[[SonicError], None],
    ) -> None:
        """Ask a server whether it has the model that requests are made for, on another thread.

        Servers come back as others, or are taken in later. `done` is called if it has not.
        """

        def ask() -> None:
            error: SonicError | None = None
            try:
                contract = endpoint.connections[0].contract(*wanted)
                if endpoint.rank == RANK:
                    self._check_digest(endpoint.url, contract, known, wanted)
                found = without_file(contract, endpoint)
            except ContractError as failure:
                error = failure
                with self._lock:
                    self._fallback_error = failure
            except SonicError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001  rows would wait for ever
                error = RequestError(f"the server cannot be asked: {failure!r}")
            with self._lock:
                endpoint.told(wanted)
                another = isinstance(error, ContractError)
                if error is None and not serves(found, known):
                    error, another = _another(endpoint, wanted), True
                if another:
                    endpoint.has(wanted, time.monotonic(), there=False)
                    self.forget(wanted)
                else:
                    note(endpoint, wanted, error)
                self._lock.notify_all()
            if error is not None:
                done(error)

        threading.Thread(target=ask, name="sonic-contract", daemon=True).start()

    def _check_digest(self, url: str, served: Contract, known: Contract, wanted: ModelKey) -> None:
        """Refuse a fallback with another digest, and warn once where the digests are not known."""
        if check_digest(served, known, server=url) or wanted in self._incomparable:
            return
        self._incomparable.add(wanted)
        logger.warning(
            "model %s of the fallback %s cannot be compared with that of the servers: the digest "
            "of one of them is not known",
            wanted[0],
            url,
        )


def _too_late(
    wanted: ModelKey, deadline: Deadline, failures: Sequence[SonicError] = ()
) -> SonicError:
    model, version = wanted
    error: SonicError = DeadlineError(
        f"no server has said within {deadline.timeout_s:g} s what the model is",
        model=model,
        version=version,
    )
    return error.because(str(failures[0])) if failures else error


def _another(endpoint: Endpoint, wanted: ModelKey) -> SonicError:
    error = ContractError(
        f"the server has a model {wanted[0]!r} that differs from that of the others; it gets none "
        "of the rows that are made for them",
        server=endpoint.url,
        model=wanted[0],
    )
    logger.warning("%s", error)
    return error
