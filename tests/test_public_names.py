"""What users may rely on by name."""

from __future__ import annotations

import inspect
import re

import pytest
from tests.scripts import python

import sonic_coffea
from sonic_coffea.pool import Settings

CLIENT = """
import os, sys
del os.fork, os.register_at_fork, os.getuid  # Windows has none of these
import sonic_coffea as sonic
model = sonic.Model("m", {"x": sonic.Padded("pt", 3)}, {"y": ["top"]})
heavy = {"coffea", "distributed", "numba", "grpc", "tritonclient", "matplotlib"}
with sonic.connect("grpc://127.0.0.1:1"):
    print(model.name, heavy & set(sys.modules))
print(sonic.transport.__name__)
"""


NAMES = """
Bucketed Choice Dense Feature Flat Folds Layout LocalServer Mask Metadata Model OneHot Output
Padded Pairwise Pending Pool Report Request Row Scaled SonicFilter SonicProcessor Tokens
Variations __version__ assignments build_repository connect constituents errors lost_tracks report
score_files secondary_vertices within_cone
"""


def test_public_names() -> None:
    assert sonic_coffea.__all__ == NAMES.split()
    for name in {*sonic_coffea.__all__, *dir(sonic_coffea)}:
        assert getattr(sonic_coffea, name) is not None
    for wrong, hint in (("Paddd", "Padded"), ("serve", "server")):
        with pytest.raises(AttributeError, match=f"did you mean '{hint}'"):
            getattr(sonic_coffea, wrong)


def test_importing_is_light_and_needs_no_unix() -> None:
    """And public modules are attributes. In a process of its own, which must not warn."""
    done = python("-c", CLIENT)
    assert (done.stdout, done.stderr) == ("m set()\nsonic_coffea.transport\n", "")


PUBLIC = {name: getattr(sonic_coffea, name) for name in sonic_coffea.__all__}
# `Variations` has the names that the user gives.
FUNCTIONS = {n: each for n, each in PUBLIC.items() if callable(each) and n != "Variations"}
DESCRIBED = {**FUNCTIONS, "Settings": Settings}


@pytest.mark.parametrize("name", DESCRIBED)
def test_docstrings_describe_all_parameters(name: str) -> None:
    text = inspect.getdoc(DESCRIBED[name]) or ""
    lines = re.findall(r"^([\w*, ]+?)(?: :.*)?$", text, re.MULTILINE)
    described = {word.strip("* ") for line in lines for word in line.split(",")}
    parameters = inspect.signature(DESCRIBED[name]).parameters.values()
    assert {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL} <= described | {"options"}
