"""The pictures of the documentation show what the package does today."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = sorted((DOCS / "pictures").glob("*.svg"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = spec_from_file_location("draw", DOCS / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("pictures")
    module.draw(folder)
    assert sorted(module.PICTURES) == [p.stem for p in PICTURES]
    return folder


def words(text: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", text)


def curves(text: str) -> dict[str, Any]:
    paths = re.findall(r'<g id="(in-flight-[^"]+)">\s*<path d="([^"]+)"', text)
    return {name: np.asarray(re.findall(r"[\d.]+", path), float) for name, path in paths}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.stem)
def test_pictures_are_as_they_would_be_drawn(picture: Path, drawn: Path) -> None:
    """If not, run ``python docs/draw.py``; other versions of matplotlib may draw a little off."""
    then = picture.read_text(encoding="utf-8")
    now = (drawn / picture.name).read_text(encoding="utf-8")
    assert words(now) == words(then) != []
    assert list(curves(now)) == list(curves(then))
    for name, curve in curves(now).items():
        np.testing.assert_allclose(curve, curves(then)[name], atol=1.0)
    assert bool(curves(now)) == (picture.stem == "limits")
