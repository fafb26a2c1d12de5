"""TorchScript modules, run by torch where the server's environment has it."""

from __future__ import annotations

import zipfile
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
    inputs, outputs = (_places(manifest[kind]) for kind in ("inputs", "outputs"))
    are_arguments = {*inputs} <= {argument.name for argument in module.forward.schema.arguments}

    def run(feed: dict[str, Any], requested: tuple[str, ...]) -> dict[str, Any]:
        del requested
        # A copy: the server's memory is read-only, which torch does not know.
        given = {name: torch.from_numpy(array.copy()) for name, array in feed.items()}
        with torch.inference_mode():
            if are_arguments:
                tensors = module(**given)
            else:
                tensors = module(*(given[name] for name in sorted(given, key=inputs.__getitem__)))
        if not isinstance(tensors, dict):
            listed = tensors if isinstance(tensors, tuple | list) else [tensors]
            tensors = {name: listed[k] for name, k in outputs.items() if k < len(listed)}
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    return run


def _places(tensors: list[dict[str, Any]]) -> dict[str, int]:
    """Return the places of tensors as Triton's own backend has them.

    They are the numbers after ``__``, or else those in the configuration.
    """
    names = [tensor["name"] for tensor in tensors]
    numbers = [name.partition("__")[2] for name in names]
    is_numbered = all(number.isdecimal() for number in numbers)
    return dict(zip(names, map(int, numbers) if is_numbered else range(len(names)), strict=True))
