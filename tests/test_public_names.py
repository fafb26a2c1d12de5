"""What users may rely on by name."""

from __future__ import annotations

import pytest

import sonic_coffea


def test_public_names() -> None:
    assert sonic_coffea.__all__ == [
        "Bucketed",
        "Dense",
        "Feature",
        "Flat",
        "Folds",
        "Layout",
        "LocalServer",
        "Mask",
        "Model",
        "OneHot",
        "Output",
        "Padded",
        "Pairwise",
        "Pending",
        "Pool",
        "Report",
        "Row",
        "SonicFilter",
        "SonicProcessor",
        "Tokens",
        "Variations",
        "__version__",
        "build_repository",
        "connect",
        "constituents",
        "errors",
        "lost_tracks",
        "report",
        "secondary_vertices",
        "within_cone",
    ]
    for name in sonic_coffea.__all__:
        assert getattr(sonic_coffea, name) is not None
    with pytest.raises(AttributeError, match="did you mean 'Padded'"):
        _ = sonic_coffea.Paddd
