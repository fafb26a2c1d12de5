"""testing: a server for tests, in this process, without a model, with faults on demand."""

from __future__ import annotations

from sonic_coffea.testing._model import FakeModel
from sonic_coffea.testing._server import FakeServer, Received, Wrong

__all__ = ["FakeModel", "FakeServer", "Received", "Wrong"]
