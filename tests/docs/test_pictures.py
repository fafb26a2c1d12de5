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


def words(text: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", text)


def curves(text: str) -> dict[str, Any]:
    paths = re.findall(r'<g id="(in-flight-[^"]+)">\s*<path d="([^"]+)"', text)
    return {name: np.asarray(re.findall(r"[\d.]+", path), float) for name, path in paths}


def test_pictures_are_as_they_would_be_drawn(tmp_path: Path) -> None:
    """If not, run ``python docs/draw.py``; other versions of matplotlib may draw a little off."""
    spec = spec_from_file_location("draw", DOCS / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.draw(tmp_path)
    assert sorted(module.PICTURES) == [p.stem for p in PICTURES]
    for picture in PICTURES:
        then = picture.read_text(encoding="utf-8")
        now = (tmp_path / picture.name).read_text(encoding="utf-8")
        assert words(now) == words(then) != [], picture
        assert list(curves(now)) == list(curves(then)), picture
        for name, curve in curves(now).items():
            np.testing.assert_allclose(curve, curves(then)[name], atol=1.0)
        assert bool(curves(now)) == (picture.stem == "limits")
