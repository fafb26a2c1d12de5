"""What is used while no server has a model: started when it is needed, and compared first."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sonic_coffea.errors import ContractError

if TYPE_CHECKING:
    from sonic_coffea.transport import Contract

logger = logging.getLogger(__name__)

# Behind all that is named, in whatever order.
RANK = 1_000_000


def check_digest(served: Contract, known: Contract, *, server: str) -> bool:
    """Return whether the digests of a fallback's model and of the servers' could be compared.

    Raises
    ------
    ContractError
        If they differ.
    """
    if not (served.digest and known.digest):
        return False
    if served.digest != known.digest:
        raise ContractError(
            f"the fallback is another model: its files have the digest {served.digest}, those of "
            f"the servers {known.digest}",
            server=server,
            model=known.model,
        )
    return True
