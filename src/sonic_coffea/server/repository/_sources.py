"""From what is to be served to the files and tensors of a model."""

from __future__ import annotations

import dataclasses
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.server.repository import _function, _onnx_file, _tree_file
from sonic_coffea.server.repository._tensors import Interface, declared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sonic_coffea.server.repository._served import Served

__all__ = ["PLATFORMS", "TEMPLATE_NAME", "Plan", "plan"]

TEMPLATE_NAME = "model.py"
_TEMPLATE = Path(__file__).with_name("_python_backend.py")
_KINDS = {
    ".onnx": "onnx",
    ".pt": "torchscript",
    ".json": "xgboost",
    ".ubj": "xgboost",
    ".txt": "lightgbm",
}
PLATFORMS = ("python", "onnxruntime", "pytorch")
_NATIVE = {"onnx": "onnxruntime", "torchscript": "pytorch"}
# What is served without being asked for: native where the tensors may have any names.
_USUAL = {"onnx": "onnxruntime"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A model to be written.

    ``files`` are names in the version's folder and what is copied there, ``file`` the one that the
    backend opens; ``about`` is what else the manifest says.
    """

    kind: str
    interface: Interface
    file: str = ""
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    platform: str = "python"

    @property
    def source(self) -> Path:
        """The file that the model comes from."""
        return self.files[self.file]


def plan(name: str, served: Served, platform: str | None) -> Plan:
    """Read what a model is, without running it.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If it is not what it should be, or more has to be said of it.
    """
    made = _plan(name, served)
    platform = served.platform or platform or _USUAL.get(made.kind, "python")
    if platform not in ("python", _NATIVE.get(made.kind)):
        raise ConfigError(
            f"platform {platform!r} cannot run model {name!r}, which is of kind {made.kind}; "
            "Served(source, platform='python') chooses another for one model"
        )
    if platform == "pytorch":
        _check_native_names(name, made.interface)
    if platform == "python":
        made = dataclasses.replace(made, files={**made.files, TEMPLATE_NAME: _TEMPLATE})
    return dataclasses.replace(made, platform=platform)


def _plan(name: str, served: Served) -> Plan:
    source = served.source
    if isinstance(source, str) and source.rpartition(":")[0].endswith(".py"):
        return _plan_function(name, served, *_function.locate(source))
    if callable(source):
        return _plan_function(name, served, *_function.locate(source))
    path = Path(source)
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        advice = f"; a function is given as '{path}:function'" if path.suffix == ".py" else ""
        raise ConfigError(
            f"expected a file of a kind that can be served ({', '.join(_KINDS)}) or a function for "
            f"model {name!r}, got {path}{advice}"
        )
    if served.files:
        raise ConfigError(f"files go with a function, and model {name!r} is of kind {kind}")
    stated = served.inputs is not None or served.outputs is not None
    interface = declared(name, served.inputs, served.outputs) if stated else None
    file = f"model{path.suffix.lower()}"
    files = {file: path}
    about: dict[str, Any] = {}
    if kind == "onnx":
        onnx = _onnx_file.read(path)
        interface = interface or onnx.interface
        files |= {external: path.parent / external for external in onnx.external}
    elif kind == "torchscript":
        _check_torchscript(path)
        interface = interface or declared(name, None, None)
    elif interface is None:
        trees = _tree_file.read(kind, path, name)
        interface, about = trees.interface, {"features": list(trees.features)}
    _check_file(path)
    return Plan(kind=kind, interface=interface, file=file, files=files, about=about)


def _plan_function(name: str, served: Served, path: Path, function: str) -> Plan:
    interface = declared(name, served.inputs, served.outputs)
    _function.check(path, function, [t.name for t in interface.inputs])
    # In a folder of their own, where no name is taken.
    files = {f"source/{path.name}": path}
    for more in map(Path, served.files):
        _check_file(more)
        if files.setdefault(f"source/{more.name}", more) != more:
            raise ConfigError(f"model {name!r} has two files of the name {more.name!r}")
    return Plan(
        kind="function",
        interface=interface,
        file=f"source/{path.name}",
        files=files,
        about={"function": function},
    )


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"expected a file, got {path}, which is none")


def _check_torchscript(path: Path) -> None:
    _check_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        names = []
    # What torch.save writes has no code in it.
    if not any(name.partition("/")[2].startswith("code/") for name in names):
        raise ConfigError(
            f"expected a TorchScript file, got {path}, which holds no TorchScript code "
            "(torch.jit.save writes one, torch.save does not)"
        )


def _check_native_names(name: str, interface: Interface) -> None:
    for tensor in interface.outputs:
        if not tensor.name.rpartition("__")[2].isdigit():
            raise ConfigError(
                f"the pytorch backend wants outputs named with their number, such as OUTPUT__0, "
                f"got {tensor.name!r} of model {name!r}"
            )
