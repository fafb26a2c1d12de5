"""Links names of other packages to their documentation, without a network."""

from __future__ import annotations

import zlib
from pathlib import Path

# Where each package describes a name: "$" is the name. Sphinx itself knows "$" only at the end.
_GENERATED = "reference/generated/$.html"
_PYTHON = {
    "bytes": "stdtypes",
    "collections.Counter": "collections",
    "dict": "stdtypes",
    "float": "functions",
    "int": "functions",
    "list": "stdtypes",
    "pathlib.Path": "pathlib",
    "set": "stdtypes",
    "str": "stdtypes",
    "tuple": "stdtypes",
}
PACKAGES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "awkward": (
        "https://awkward-array.org/doc/main",
        {
            "ak.Array": ("py:class", _GENERATED),
            **{
                f"ak.{name}": ("py:function", _GENERATED)
                for name in ("zip", "flatten", "unflatten", "pad_none", "fill_none", "firsts")
            },
        },
    ),
    "coffea": (
        "https://coffea-hep.readthedocs.io/en/latest",
        {
            f"coffea.{name}": ("py:class", "api/$.html#$")
            for name in (
                "nanoevents.NanoAODSchema",
                "nanoevents.NanoEventsFactory",
                "processor.DaskExecutor",
                "processor.FuturesExecutor",
                "processor.ProcessorABC",
                "processor.Runner",
            )
        },
    ),
    "distributed": (
        "https://distributed.dask.org/en/stable",
        {"distributed.Client": ("py:class", "api.html#$")},
    ),
    "grpc": (
        "https://grpc.github.io/grpc/python",
        {"grpc.StatusCode": ("py:class", "grpc.html#$")},
    ),
    "matplotlib": (
        "https://matplotlib.org/stable",
        {"matplotlib.axes.Axes": ("py:class", "api/_as_gen/$.html")},
    ),
    "numpy": (
        "https://numpy.org/doc/stable",
        {
            **dict.fromkeys(("numpy.dtype", "numpy.ndarray"), ("py:class", _GENERATED)),
            "numpy.int64": ("py:class", "reference/arrays.scalars.html#$"),
        },
    ),
    "python": (
        "https://docs.python.org/3",
        {
            **{name: ("py:class", f"library/{page}.html#$") for name, page in _PYTHON.items()},
            "callable": ("py:function", "library/functions.html#$"),
            "datetime.datetime": ("py:class", "library/datetime.html#$"),
            **dict.fromkeys(("None", "True", "False"), ("py:data", "library/constants.html#$")),
            **dict.fromkeys(
                ("hashable", "iterable", "iterator", "mapping", "sequence"),
                ("std:term", "glossary.html#term-$"),
            ),
            "bltin-boolean-values": ("std:label", "library/stdtypes.html#$"),
        },
    ),
}
# How docstrings call them.
WORDS = {
    "array": "numpy.ndarray",
    "awkward array": "ak.Array",
    "Axes": "matplotlib.axes.Axes",
    "Client": "distributed.Client",
    "Counter": "collections.Counter",
    "datetime": "datetime.datetime",
    "dtype": "numpy.dtype",
    "int64": "numpy.int64",
    "NanoEvents": "coffea.nanoevents.NanoEventsFactory",
    "Path": "pathlib.Path",
    "Runner": "coffea.processor.Runner",
}


def inventories(folder: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each package, and return what `intersphinx_mapping` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for package, (url, names) in PACKAGES.items():
        head = f"# Sphinx inventory version 2\n# Project: {package}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        pages = {name: (role, page.replace("$", name)) for name, (role, page) in names.items()}
        lines = [f"{name} {role} 1 {page} -\n" for name, (role, page) in pages.items()]
        file = folder / f"{package}.inv"
        file.write_bytes(head.encode() + zlib.compress("".join(lines).encode()))
        mapping[package] = (url, str(file))
    return mapping
