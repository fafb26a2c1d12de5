"""What a call holds of its rows, and until when."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import awkward as ak
import numpy as np
import pytest
from tests.waiting import until

import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = sonic.Model("tagger", {"x": sonic.Padded(["pt"], 4)}, {"y": ["top"]})


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_rows_are_freed_with_their_call() -> None:
    """Chunks are large, and few objects: cycles of them are collected many chunks later."""
    pt = np.ones(60, np.float32)
    freed = weakref.ref(pt)
    content = ak.contents.RecordArray([ak.contents.NumpyArray(pt)], ["pt"])
    jets = ak.Array(ak.contents.RegularArray(content, 3))
    with FakeServer({MODEL.name: FakeModel.of(MODEL)}) as server, sonic.connect(server.url) as pool:
        top = MODEL(jets, pool=pool).top
        del pt, content, jets
        until(lambda: freed() is None)  # by the pool's thread, too
    assert len(top) == 20
