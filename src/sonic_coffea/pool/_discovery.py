"""Which servers have a model, and what it takes and gives."""

from __future__ import annotations

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TYPE_CHECKING

from sonic_coffea.errors import ContractError, ModelNotFoundError, SonicError
from sonic_coffea.pool._fallback import RANK

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from sonic_coffea.pool._deadline import Deadline
    from sonic_coffea.pool._endpoint import Endpoint, ModelKey
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# Once one server has answered, the others have so long: one that hangs must not hold up the rest.
_OTHERS_S = 1.0


def ask_contract(
    endpoints: Sequence[Endpoint], wanted: ModelKey, lock: threading.Condition, deadline: Deadline
) -> tuple[Contract | None, list[SonicError]]:
    """Ask all servers at the same time what a model takes and gives.

    Parameters
    ----------
    endpoints : sequence of Endpoint
        The servers; what they say is noted there.
    wanted : tuple
        The model, and the version if one is asked for.
    lock : Condition
        Guards the endpoints.
    deadline : Deadline
        When nobody waits for their answers any more.

    Returns
    -------
    Contract or None
        What those that have the model say, with the limits of the strictest; None also if the time
        was not enough to hear them.
    list of SonicError
        What the others failed with.

    Raises
    ------
    ContractError
        If two servers have different models of this name.
    """
    executor = ThreadPoolExecutor(len(endpoints), thread_name_prefix="sonic-contract")
    asked = {executor.submit(e.connections[0].contract, *wanted): e for e in endpoints}
    executor.shutdown(wait=False)
    found: dict[str, Contract] = {}
    failures: list[SonicError] = []
    left: set[Future[Contract]] = set(asked)
    until: float | None = None
    while left:
        patience_s = deadline.left_s if until is None else deadline.within(until - time.monotonic())
        done, left = wait(left, patience_s, return_when=FIRST_COMPLETED)
        if not done:
            break
        for future in done:
            endpoint = asked[future]
            try:
                contract = future.result()
            except SonicError as error:
                failures.append(error)
                with lock:
                    note(endpoint, wanted, error)
            else:
                found[endpoint.url] = without_file(contract, endpoint)
                with lock:
                    if endpoint.rank == RANK:
                        endpoint.lives(time.monotonic())  # its digest is compared first
                    else:
                        note(endpoint, wanted, None)
                until = until or time.monotonic() + _OTHERS_S
    if left and deadline.over:
        return None, failures
    for future in left:
        url = asked[future].url
        logger.warning("%s did not say within %.0f s what model %s is", url, _OTHERS_S, wanted[0])
    _compare(found)
    return _common(list(found.values())), failures


def note(endpoint: Endpoint, wanted: ModelKey, error: SonicError | None) -> None:
    """Take note of what came of asking a server for a model; the caller holds the lock."""
    now = time.monotonic()
    if error is None or isinstance(error, ModelNotFoundError):
        endpoint.lives(now)
        endpoint.has(wanted, now, there=error is None)
    else:
        endpoint.failed(error, now)


def _compare(found: dict[str, Contract]) -> None:
    """Refuse servers that have different models under one name: scores would depend on luck."""
    first = next(iter(found), "")
    for url, other in found.items():
        one = found[first]
        if (one.inputs, one.outputs) != (other.inputs, other.outputs) or _differ(one, other):
            raise ContractError(
                f"{first} and {url} have different models of this name; pin a version, or connect "
                "to one of them",
                model=one.model,
            )
        if one.version != other.version:
            logger.warning(
                "%s has version %s of model %s, %s version %s; scores may depend on the server, "
                "pin a version to avoid it",
                first,
                one.version,
                one.model,
                url,
                other.version,
            )


def without_file(contract: Contract, endpoint: Endpoint) -> Contract:
    """Leave out the digest of a fallback: that of the servers says which model is meant."""
    return replace(contract, digest="") if endpoint.rank == RANK else contract


def _differ(one: Contract, other: Contract) -> bool:
    """Whether two servers say that they have other files of the same version."""
    same = one.version == other.version
    return same and bool(one.digest and other.digest) and one.digest != other.digest


def serves(found: Contract, known: Contract) -> bool:
    """Return whether a server has the model that requests are made for."""
    tensors = (found.inputs, found.outputs) == (known.inputs, known.outputs)
    if _differ(found, known):
        return False
    if found.max_rows is None or not tensors:
        return tensors
    return known.max_rows is not None and known.max_rows <= found.max_rows


def _common(contracts: Sequence[Contract]) -> Contract | None:
    if not contracts:
        return None
    limits = [c.max_rows for c in contracts if c.max_rows is not None]
    preferred = set.intersection(*(set(c.preferred_rows) for c in contracts))
    # Only what all say: of one that does not, nobody knows which file it has.
    digests = {c.digest for c in contracts}
    return replace(
        contracts[0],
        digest=contracts[0].digest if len(digests) == 1 else "",
        max_rows=min(limits, default=None),
        preferred_rows=tuple(sorted(preferred)),
    )
