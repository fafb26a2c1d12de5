"""What users may rely on by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sonic_coffea

# Windows has none of these.
WITHOUT_UNIX = """
import os
del os.fork, os.register_at_fork, os.getuid
import sonic_coffea as sonic
model = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
with sonic.connect("grpc://127.0.0.1:1") as pool:
    print(model.name)
"""


NAMES = """
Bucketed Choice Dense Feature Flat Folds Layout LocalServer Mask Metadata Model OneHot Output
Padded Pairwise Pending Pool Report Request Row Scaled SonicFilter SonicProcessor Tokens
Variations __version__ assignments build_repository connect constituents errors lost_tracks report
score_files secondary_vertices within_cone
"""


def printed(code: str) -> str:
    """What code prints in a process of its own, which must not warn."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    return done.stdout


def test_public_names() -> None:
    assert sonic_coffea.__all__ == NAMES.split()
    for name in {*sonic_coffea.__all__, *dir(sonic_coffea)}:
        assert getattr(sonic_coffea, name) is not None
    for wrong, hint in (("Paddd", "Padded"), ("serve", "server")):
        with pytest.raises(AttributeError, match=f"did you mean '{hint}'"):
            getattr(sonic_coffea, wrong)


def test_public_modules_are_attributes() -> None:
    code = "import sonic_coffea as sonic; print(sonic.server.ensure.__name__, sonic.transport)"
    assert printed(code).startswith("ensure <module 'sonic_coffea.transport'")


def test_clients_need_no_unix() -> None:
    assert printed(WITHOUT_UNIX) == "m\n"
