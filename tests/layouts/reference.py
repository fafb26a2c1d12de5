"""What every layout makes of an array, by plain loops over lists: slow, and written independently.

`REFERENCES` has a function for each layout; another layout gets one with `@reference(Layout)`, and
a strategy in ``test_oracle.py``. It takes the layout and an array, or a dict of columns, and
returns the tensor as nested lists, or as an array. It raises `Refused` where the layout must.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import awkward as ak
import ml_dtypes
import numpy as np

import sonic_coffea as sonic

REFERENCES: dict[type, Callable[[Any, Any], Any]] = {}


class Refused(Exception):  # noqa: N818
    """The layout must raise an `InputError`."""


def reference(layout: type) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        REFERENCES[layout] = function
        return function

    return register


def expected(layout: Any, array: Any) -> np.ndarray:
    """Return the tensor that the layout makes of an array."""
    return np.asarray(REFERENCES[type(layout)](layout, array), layout.dtype)


def rows_of(plain: Any, depth: int) -> list[Any]:
    """Return what is there below `depth` lists."""
    if plain is None:
        return []
    if depth == 0:
        return [plain]
    return [row for inner in plain for row in rows_of(inner, depth - 1)]


def replaced(plain: Any, depth: int, values: Any) -> Any:
    """Return the structure with the next of some values in the place of each row."""
    if plain is None:
        return None
    if depth == 0:
        return next(values)
    return [replaced(inner, depth - 1, values) for inner in plain]


def placed(array: ak.Array, each: Any) -> Any:
    """Return the structure of objects with one of some values in the place of each."""
    return replaced(ak.to_list(array[["q"]]), array["q"].ndim, iter(each))


def values(array: ak.Array, path: str) -> list[Any]:
    """Return the value of each object, or the list of its constituents' values."""
    plain = ak.to_list(array[[path.partition(".")[0].partition("[")[0]]])
    return [value_of(row, path) for row in rows_of(plain, array["q"].ndim)]


def value_of(row: Any, path: str) -> Any:
    """Return what is at a path, such as "m", "pf.pt", "pf", or "pf[0].pt"."""
    name, _, inner = path.partition(".")
    name, _, place = name.partition("[")
    value = row[name]
    if place:
        number = int(place.removesuffix("]"))
        value = value[number] if -len(value) <= number < len(value) else None
    if inner and isinstance(value, list):
        return [None if element is None else element[inner] for element in value]
    return value[inner] if inner and value is not None else value


def lists(layout: Any, array: Any) -> list[list[list[Any]]]:
    """Return, of each field and row, the values; that of an object is each constituent's."""
    each = [values(array, feature.name) for feature in layout.features]
    counts = list(map(len, each[0]))
    return [
        [v if isinstance(v, list) else [v] * n for v, n in zip(column, counts, strict=True)]
        for column in each
    ]


def numbers(layout: Any, values: Any) -> list[Any]:
    """Return the numbers of all channels as they are sent."""
    sent = []
    for feature, value, missing in zip(
        layout.features, values, layout.missing or [None] * len(layout.features), strict=True
    ):
        if value is None and missing is None:
            raise Refused("None")
        if value is None and layout.pad == "after":
            sent.append(text(missing))
        else:
            sent.append(number(feature, missing if value is None else value, layout.dtype))
    return sent


def text(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def number(feature: Any, value: Any, target: np.dtype[Any]) -> Any:
    """Return a number, or a text, as it is sent."""
    if target.kind == "O":
        return text(value)
    plain = feature == sonic.Feature(feature.name)
    result = replaced_number(feature, value)
    if feature.nonfinite is None and not math.isfinite(result):
        raise Refused(f"{value} is not finite")
    if set(feature.options) - {"replace", "nonfinite", "nonfinite_last"}:
        with np.errstate(all="ignore"):
            result = within(np.float64(result), feature.within)
            if feature.power is not None:
                result = result**feature.power
            if feature.function is not None:
                result = getattr(np, feature.function)(result)
            if not feature.nonfinite_last:
                result = finite(feature, result)
            result = (result - feature.shift) * feature.scale
        result = within(result, (feature.lower, feature.upper))
    result = finite(feature, result)
    if not math.isfinite(result):
        raise Refused(f"{value} becomes {result}")
    return held(result, target, exact=plain)


def replaced_number(feature: Any, value: Any) -> Any:
    """Return what replaces a number, or its category."""
    if not math.isfinite(value):
        return value
    known = dict(feature.categories or feature.replace or ())
    if feature.categories and value not in known and None not in known:
        raise Refused(f"{value} is no category")
    return known.get(value, known.get(None, value))


def within(value: Any, limits: Any) -> Any:
    lower, upper = limits or (None, None)
    if lower is not None and value < lower:
        return np.float64(lower)
    return np.float64(upper) if upper is not None and value > upper else value


def finite(feature: Any, value: Any) -> Any:
    return value if feature.nonfinite is None or math.isfinite(value) else feature.nonfinite


def held(value: Any, target: np.dtype[Any], *, exact: bool) -> Any:
    if target.kind == "b":
        if value not in (0, 1):
            raise Refused(f"{target} cannot hold {value}")
        return bool(value)
    if target.kind in "iu":
        info = np.iinfo(target)
        # As a float, the largest of 64 bits is one more than that.
        whole = int(value)
        if whole != value or value < info.min or whole > info.max:
            raise Refused(f"{target} cannot hold {value}")
        if not exact and isinstance(value, float) and abs(value) >= 2**53:
            raise Refused(f"{value} may be rounded")
        return whole
    with np.errstate(all="ignore"):
        sent = np.float64(value) if target == np.float64 else np.float32(value).astype(target)
    if not math.isfinite(sent):
        raise Refused(f"{target} cannot hold {value}")
    return sent


def sorting(layout: Any, array: Any) -> list[list[int]]:
    """Return the order of the elements of each row."""
    each = values(array, layout.features[0].name)
    if layout.sort_by is None:
        return [list(range(len(row))) for row in each]
    keys = values(array, layout.sort_by)
    if not all(key is not None and math.isfinite(key) for row in keys for key in row):
        raise Refused("a key is not finite")
    return [sorted(range(len(row)), key=lambda k, row=row: -row[k]) for row in keys]


@reference(sonic.Row)
def row(layout: Any, array: Any) -> Any:
    columns = [values(array, f.name) for f in layout.features]
    rows_ = [numbers(layout, values) for values in zip(*columns, strict=True)]
    count = len(columns)
    if layout.axis_order == "FL":
        return [[[x] for x in row] for row in rows_] or empty(count, 1)
    if layout.axis_order == "LF":
        return [[row] for row in rows_] or empty(1, count)
    return rows_ or empty(count)


def elements(layout: Any, array: Any, length: int | None) -> list[list[list[Any]]]:
    """Return, of each row, the numbers of each element that is sent."""
    order = sorting(layout, array)
    each = lists(layout, array)
    return [
        [numbers(layout, [column[i][k] for column in each]) for k in places[:length]]
        for i, places in enumerate(order)
    ]


def behind(layout: Any, array: Any, place: int, row: list[Any], length: int) -> list[Any]:
    """Return what pads a row; before the transformation, numbers of the object stay its own."""
    places = range(len(row), length)
    if row and layout.pad_mode == "wrap":
        return [row[k % len(row)] for k in places]
    if not places:
        return []
    fill = [text(value) for value in layout.fill]
    if layout.pad == "before":
        own = [
            value if "." in feature.name else values(array, feature.name)[place]
            for feature, value in zip(layout.features, fill, strict=True)
        ]
        fill = numbers(layout, own)
    return [fill for _ in places]


def padded_to(layout: Any, array: Any, length: int) -> Any:
    kept = enumerate(elements(layout, array, length))
    tensor = [row + behind(layout, array, k, row, length) for k, row in kept]
    if layout.axis_order == "L":
        return [[e[0] for e in row] for row in tensor] or empty(length)
    if layout.axis_order == "FL":
        tensor = [[[e[j] for e in row] for j in range(len(layout.features))] for row in tensor]
    shape = (len(layout.features), length)
    return tensor or empty(*(shape if layout.axis_order == "FL" else shape[::-1]))


@reference(sonic.Padded)
def padded(layout: Any, array: Any) -> Any:
    return padded_to(layout, array, layout.length)


@reference(sonic.Bucketed)
def bucketed(layout: Any, array: Any) -> Any:
    """Pad as a request of all rows: the longest decides."""
    longest = max(map(len, values(array, layout.features[0].name)), default=0)
    length = next((n for n in layout.lengths if n >= longest), layout.lengths[-1])
    return padded_to(layout, array, length)


@reference(sonic.Flat)
def flat(layout: Any, array: Any) -> Any:
    kept = elements(layout, array, None)
    return [e for row in kept for e in row] or empty(len(layout.features))


@reference(sonic.Mask)
def mask(layout: Any, array: Any) -> Any:
    counts = [len(row) for row in values(array, layout.of)]
    length = layout.lengths[-1] if layout.lengths else max([*counts, 1])
    flags = np.arange(length) < np.reshape(counts, (-1, 1))
    return {"FL": flags[:, None], "LF": flags[..., None], "L": flags}[layout.axis_order]


@reference(sonic.Dense)
def dense(layout: Any, array: Any) -> Any:
    (feature,) = layout.features
    arrays = values(array, feature.name)
    images = [[[number(feature, x, layout.dtype) for x in line] for line in r] for r in arrays]
    shape = layout.shape or (2, 3)
    return np.asarray(images, layout.dtype).reshape(len(images), *shape)


def channel(feature: Any) -> str:
    return str(feature.channel.rpartition(".")[2])


@reference(sonic.Tokens)
def tokens(layout: Any, array: Any) -> Any:
    channels = list(dict.fromkeys(channel(f) for _, part in layout.parts for f in part.features))
    each: list[list[Any]] = []
    for place, (_, part) in enumerate(layout.parts):
        if isinstance(part, sonic.Row):
            length = 1
            kept = [[row.reshape(-1).tolist()] for row in expected(part, array)]
        else:
            length = part.length
            kept = elements(part, array, length)
        flags: list[float] = []
        if layout.flags == "onehot":
            flags = [float(k == place) for k in range(len(layout.parts))]
        elif layout.flags == "number":
            flags = [place + 1.0]
        own = [channel(f) for f in part.features]
        each.append([])
        for n, row in enumerate(kept):
            padding = [] if isinstance(part, sonic.Row) else behind(part, array, n, row, length)
            each[-1].append([])
            for k, token in enumerate(row + padding):
                values = dict(zip(own, token, strict=True))
                token_flags = flags if k < len(row) else [0.0] * len(flags)
                each[-1][-1].append([values.get(c, layout.fill) for c in channels] + token_flags)
    rows_of_all = [[t for part in parts for t in part] for parts in zip(*each, strict=True)]
    width, length = len(channels) + len(flags), layout.lengths[0]
    if layout.axis_order == "FL":
        return [list(zip(*row, strict=True)) for row in rows_of_all] or empty(width, length)
    return rows_of_all or empty(length, width)


FORMULAE = (
    "pt_i - pt_j",
    "abs(pt_i - 2 * id_j)",
    "min(pt_i, id_j) * id_i",
    "log(max(abs(pt_i * pt_j), 1e-3))",
    "delta_phi(3 * tanh(pt_i), 3 * tanh(id_j))",
    "(pt_i - id_j)**2 + sin(pt_i) * cos(id_j)",
    "-min(pt_i, pt_j) ** 1.5",
    "arctan2(pt_i, id_j) + sqrt(pt_i) - exp(-pt_j)",
    "tanh(pt_i) + sinh(id_j / 9) * cosh(pt_i / 9) + log1p(pt_j)",
)
MATH = {
    **{name: getattr(math, name) for name in ("log", "log1p", "exp", "sqrt", "sin", "cos")},
    **{name: getattr(math, name) for name in ("sinh", "cosh", "tanh")},
    "arctan2": math.atan2,
    "delta_phi": lambda a, b: math.remainder(a - b, 2 * math.pi),
}


def computed(formula: str, a: Any, b: Any) -> float:
    """Return what Python makes of a formula."""
    values = {f"{name}_{k}": pair[name] for k, pair in (("i", a), ("j", b)) for name in pair}
    try:
        result = eval(formula, MATH, values)  # noqa: S307
    except (ArithmeticError, ValueError) as error:
        raise Refused(f"{formula}: {error}") from None
    if isinstance(result, complex):
        raise Refused(f"{formula} is not real")
    return float(result)


@reference(sonic.Pairwise)
def pairwise(layout: Any, array: Any) -> Any:
    longest = max(map(len, values(array, layout.features[0].name)), default=0)
    length = next((n for n in layout.lengths if n >= longest), layout.lengths[-1])
    # Formulae are computed of what a tensor of float64 would hold.
    wide = sonic.Padded(list(layout.features), length, dtype="float64", sort_by=layout.sort_by)
    names = [channel(f) for f in layout.features]
    each = [
        [dict(zip(names, map(float, element), strict=True)) for element in row]
        for row in elements(wide, array, length)
    ]
    tensor = np.full((0, len(layout.formulae), length, length), 0.0)
    grids = []
    for row in each:
        grid = np.empty(tensor.shape[1:], layout.dtype)
        grid[:] = np.asarray(layout.fill)[:, None, None]
        for c, formula in enumerate(layout.formulae):
            for i, a in enumerate(row):
                for j, b in enumerate(row):
                    grid[c, i, j] = held(computed(formula, a, b), layout.dtype, exact=False)
        grids.append(grid)
    stacked = np.stack(grids) if grids else tensor
    return stacked if layout.axis_order == "CLL" else stacked.transpose(0, 2, 3, 1)


def empty(*shape: int) -> Any:
    return np.zeros((0, *shape))


def unpacked(layout: Any, array: Any) -> list[Any]:
    """Return, of each row, the inverse of a tensor that was packed.

    Numbers are those of the tensor; elements that were truncated are None.
    """
    if isinstance(layout, sonic.Tokens):
        parts = {name: renamed(unpacked(part, array)) for name, part in layout.parts}
        return [dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True)]
    seen = [f.channel for f in layout.features]
    counts = [seen[:i].count(name) for i, name in enumerate(seen)]
    names = [f"{name}_{n}" if n else name for name, n in zip(seen, counts, strict=True)]
    tensor = expected(layout, array)
    if layout.dtype == object:
        tensor = np.vectorize(bytes.decode, otypes=[object])(tensor)
    if layout.dtype == ml_dtypes.bfloat16:
        tensor = tensor.astype(np.float32)
    if isinstance(layout, sonic.Dense):
        plain: list[Any] = tensor.tolist()
        return plain
    if not layout.jagged:
        by_row = tensor.reshape(len(tensor), len(names)).tolist()
        return [dict(zip(names, row, strict=True)) for row in by_row]
    each: list[Any] = []
    remaining = iter(tensor.tolist())
    for i, order in enumerate(sorting(layout, array)):
        if isinstance(layout, sonic.Flat):
            sent = [next(remaining) for _ in order]
        else:
            row = tensor[i].T if layout.axis_order == "FL" else tensor[i]
            sent = row.reshape(-1, len(names)).tolist()
        each.append([None] * len(order))
        for place, numbers_of_element in zip(order, sent, strict=False):
            each[-1][place] = dict(zip(names, numbers_of_element, strict=True))
    return each


def renamed(plain: Any) -> Any:
    """Return records, or lists of them, whose fields have the channels' names."""
    if isinstance(plain, dict):
        return {name.rpartition(".")[2]: value for name, value in plain.items()}
    return None if plain is None else [renamed(inner) for inner in plain]
