"""pytest's fixture `sonic_server`, which pytest finds if this package is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sonic_coffea.model import Model
    from sonic_coffea.testing import FakeServer


@pytest.fixture  # type: ignore[untyped-decorator]  # pytest is not a dependency
def sonic_server() -> Iterator[Callable[..., FakeServer]]:
    """Start a `FakeServer` for models, and connect this process to it, until the test is over.

    Call it with the models, `sonic_coffea.Model`: ``server = sonic_server(tagger)``. Functions make
    the outputs of some of them: ``sonic_server(tagger, functions={"tagger": function})``. Other
    keywords are options of `sonic_coffea.connect`.
    """
    # Every test session loads this module, and most need nothing of it.
    import sonic_coffea as sonic
    from sonic_coffea.errors import require
    from sonic_coffea.testing import FakeModel, FakeServer

    with ExitStack() as stack:

        def start(
            *models: Model, functions: dict[str, Any] | None = None, **options: Any
        ) -> FakeServer:
            functions = functions or {}
            require(functions, [model.name for model in models], "a function of no model:")
            served = {m.name: FakeModel.of(m, functions.get(m.name)) for m in models}
            server = stack.enter_context(FakeServer(served))
            stack.enter_context(sonic.connect(server.url, **options))
            return server

        yield start
