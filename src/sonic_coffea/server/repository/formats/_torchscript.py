"""TorchScript modules, run by torch where the server's environment has it."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sonic_coffea.server.repository.formats import Contents, Runner, Served


def read(served: Served) -> Contents:
    """Check that a file holds code; one that torch.save has written does not."""
    path = Path(str(served.source))
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile:
        names = []
    if not any(name.partition("/")[2].startswith("code/") for name in names):
        raise ValueError(
            f"expected a TorchScript file, got {path}, which holds no TorchScript code "
            "(torch.jit.save writes one, torch.save does not)"
        )
    return {"files": {"model.pt": path}}


def load(path: Path, manifest: dict[str, Any], threads: int) -> Runner:
    import torch  # type: ignore[import-not-found,unused-ignore]

    if threads:
        torch.set_num_threads(threads)
    module = torch.jit.load(str(path), map_location="cpu").eval()
    arguments = [argument.name for argument in module.forward.schema.arguments[1:]]
    inputs = _positions([spec["name"] for spec in manifest["inputs"]], arguments)
    outputs = _positions([spec["name"] for spec in manifest["outputs"]])

    def run(feed: dict[str, Any], requested: tuple[str, ...]) -> dict[str, Any]:
        del requested
        arrays = [feed[name] for name in sorted(feed, key=lambda name: inputs[name])]
        with torch.inference_mode():
            # A copy: the server's memory is read-only, which torch does not know.
            tensors = module(*(torch.from_numpy(array.copy()) for array in arrays))
        if not isinstance(tensors, dict):
            listed = tensors if isinstance(tensors, tuple | list) else [tensors]
            tensors = {name: listed[k] for name, k in outputs.items() if k < len(listed)}
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    return run


def _positions(names: list[str], arguments: Sequence[str] = ()) -> dict[str, int]:
    """Return the positions of tensors as Triton's own backend has them.

    They are those of the arguments of these names, or else the numbers after ``__``, or else those
    in the configuration.
    """
    if set(names) <= set(arguments):
        return {name: arguments.index(name) for name in names}
    numbers = [name.partition("__")[2] for name in names]
    is_numbered = all(number.isdecimal() for number in numbers)
    return dict(zip(names, map(int, numbers) if is_numbered else range(len(names)), strict=True))
