"""Events of the sample, whose files hold only a part of NanoAOD."""

from __future__ import annotations

from typing import Any

from coffea.nanoevents import NanoAODSchema, NanoEventsFactory

from sonic_coffea.demo.samples import DATA


class Schema(NanoAODSchema):
    """Without warnings of branches that refer to absent collections."""

    warn_missing_crossrefs = False


def sample(name: str = "TTbar_1", mode: str = "virtual", **options: Any) -> Any:
    """Return the events of one of the files, as coffea reads them."""
    files = {str(DATA / f"{name}.root"): "Events"}
    return NanoEventsFactory.from_root(files, schemaclass=Schema, mode=mode, **options).events()
