"""The schema of the sample, which holds only a part of NanoAOD."""

from coffea.nanoevents import NanoAODSchema


class Schema(NanoAODSchema):
    """Without warnings of branches that refer to absent collections."""

    warn_missing_crossrefs = False
