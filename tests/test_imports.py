"""What the package imports is declared in pyproject.toml, and nothing is declared for nothing."""

from __future__ import annotations

import re
import sys
from importlib.metadata import requires

import pytest
from tests.scripts import python
from tests.test_architecture import MODULES, imports

from sonic_coffea import provenance
from sonic_coffea.errors import ConfigError

# These run in a server, or in its environment, whose packages `server/_install.py` pins.
OF_THE_SERVER = {
    *("lightgbm", "onnxruntime", "torch", "xgboost"),
}
# Without these there is nothing that could use what imports them: Prometheus, or pytest.
OPTIONAL = {"prometheus_client", "pytest"}
# Modules that are not called as their packages.
PACKAGES = {"google": "protobuf", "grpc": "grpcio", "sklearn": "scikit-learn", "yaml": "pyyaml"}
# The extra that has what not everybody needs.
EXTRAS = {
    **dict.fromkeys(("bokeh", "hist", "matplotlib", "mplhep", "sklearn"), "demo"),
    **dict.fromkeys(("pyarrow", "uproot"), "score"),
    "dask_awkward": "lazy",
    "onnx": "onnx",
    "uv": "server",
}


def imported() -> set[str]:
    names = {name.partition(".")[0] for module in MODULES for name in imports(module)}
    return names - sys.stdlib_module_names - OF_THE_SERVER - OPTIONAL - {"sonic_coffea"}


def declared() -> dict[str, set[str]]:
    """Return the packages that each extra asks for; those of everybody under an empty name."""
    packages_of: dict[str, set[str]] = {"": set()}
    for requirement in requires("sonic-coffea") or ():
        package, _, marker = requirement.partition(";")
        extra = re.search(r"""extra == ['"](\w+)""", marker)
        name = re.match(r"[\w.-]+", package)
        assert name is not None
        packages_of.setdefault(extra[1] if extra else "", set()).add(distribution_name(name[0]))
    return packages_of


def distribution_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_imported_packages_are_declared_and_no_others() -> None:
    has = declared()
    packages = {module: PACKAGES.get(module, distribution_name(module)) for module in imported()}
    missing = {m: name for m, name in packages.items() if name not in has[EXTRAS.get(m, "")]}
    assert missing == {}
    assert has[""] - set(packages.values()) == set()


WORKER = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # as if none were installed
import awkward as ak
import sonic_coffea as sonic
from sonic_coffea.testing import FakeModel, FakeServer
model = sonic.Model("m", {"x": sonic.Row(["pt"])}, {"y": ["top"]})
with FakeServer({"m": FakeModel.of(model)}) as server, sonic.connect(server.url):
    print(len(model(ak.Array({"pt": [1.0, 2.0]}))))
"""


def test_scoring_needs_nothing_of_an_extra() -> None:
    done = python("-c", WORKER, *EXTRAS, "typer")
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.parametrize(("package", "path"), [("pyarrow", "x.parquet"), ("uproot", "x.root")])
def test_errors_name_the_extra(package: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ConfigError, match=rf'{package}.*; in a clone .*: pip install "\.\[score\]"'
    ):
        provenance.read(path)
