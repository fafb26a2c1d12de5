"""Packages that not every worker needs, each installed by an extra of this package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sonic_coffea.errors import ConfigError


@contextlib.contextmanager
def needed(extra: str, purpose: str) -> Iterator[None]:
    """Import, within the block, what an extra installs; say which extra if it is not there.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{purpose} needs {error.name}; in a clone of sonic-coffea: pip install ".[{extra}]"'
        ) from None
