"""From what is to be served to the files and tensors of a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonic_coffea.errors import ConfigError
from sonic_coffea.server.repository._tensors import Interface, declared
from sonic_coffea.server.repository.formats import FORMATS, format_of, scripts_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sonic_coffea.server.repository._served import Served


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What a model is made of.

    ``files`` are names in the version's folder and what is copied there, first the one that the
    backend opens; ``scripts`` are those that run it, and no part of it; ``manifest`` is what else
    the manifest says.
    """

    kind: str
    interface: Interface
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    scripts: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    manifest: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    platform: str = "python"

    @property
    def file(self) -> str:
        """The name of the file that the backend opens; empty where there is none."""
        return next(iter(self.files), "")


def read_source(name: str, served: Served, platform: str | None) -> ModelSource:
    """Read what a model is, without running it.

    Raises
    ------
    sonic_coffea.errors.ConfigError
        If it is not what it should be, or more has to be said of it.
    """
    kind = format_of(served.source)
    if kind is None:
        suffixes = ", ".join(suffix for f in FORMATS.values() for suffix in f.suffixes)
        raise ConfigError(
            f"expected a file of a kind that can be served ({suffixes}) for model {name!r}, "
            f"got {served.source}"
        )
    if served.files and kind != "function":
        raise ConfigError(f"files go with a function, and model {name!r} is of kind {kind}")
    model_format = FORMATS[kind]
    usual = model_format.native if model_format.prefers_native else None
    platform = served.platform or platform or usual or "python"
    if platform not in ("python", model_format.native):
        raise ConfigError(
            f"platform {platform!r} cannot run model {name!r}, which is of kind {kind}; "
            "Served(source, platform='python') chooses another for one model"
        )
    if kind != "function" and not Path(str(served.source)).is_file():
        raise ConfigError(
            f"expected a file of kind {kind} for model {name!r}, got {served.source}, which is not "
            "a file"
        )
    try:
        contents = model_format.read(served)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error} (model {name!r})") from None
    tensors = (contents.get("inputs"), contents.get("outputs"))
    if served.inputs is not None or served.outputs is not None:
        tensors = (served.inputs, served.outputs)
    interface = declared(name, *tensors)
    if platform == "pytorch":
        _check_native_names(name, interface)
    return ModelSource(
        kind=kind,
        interface=interface,
        files=contents["files"],
        scripts=scripts_of(kind) if platform == "python" else {},
        manifest=contents.get("manifest", {}),
        platform=platform,
    )


def _check_native_names(name: str, interface: Interface) -> None:
    for tensor in interface.outputs:
        if not tensor.name.rpartition("__")[2].isdigit():
            raise ConfigError(
                f"the pytorch backend wants outputs named with their number, such as OUTPUT__0, "
                f"got {tensor.name!r} of model {name!r}"
            )
