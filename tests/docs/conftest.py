"""What a user's shell has."""

from __future__ import annotations

import pytest

from .support import clean_environment


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment."""
    return clean_environment(tmp_path_factory.mktemp("state"))
