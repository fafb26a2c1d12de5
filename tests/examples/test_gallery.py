"""Every example of the gallery runs on a real Triton, equals the direct way, and makes sense."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sonic_coffea.server import ensure

if TYPE_CHECKING:
    from collections.abc import Iterator

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"

# What comes out, within what is sensible: as printed, and at least, at most.
EXPECTED: dict[str, dict[str, tuple[float, float]]] = {
    "particle_transformer": {"auc": (0.9, 1), "mass of tops: median of the ratio": (0.8, 1.2)},
    "tau_images": {"auc": (0.85, 1)},
    "deepmet": {"resolution [GeV]": (1, 24), "without weights [GeV]": (25, 60)},
    "facile": {"mean error [GeV]": (0, 0.6), "of a sum of three samples [GeV]": (0.7, 5)},
    "wire_images": {"accuracy": (0.75, 1)},
    "gravnet": {"hits in the right cluster": (0.8, 1)},
    "mlpf": {"accuracy": (0.9, 1), "resolution of charged hadrons": (0, 0.1)},
    "graph_attention": {"auc": (0.85, 1)},
    "resnet50": {"auc": (0.8, 1)},
    "clustering": {"leading pt over that of the file": (0.9, 1.1), "jets an event": (1, 10)},
    "fixed_point": {"auc": (0.85, 1)},
    "kfold": {"auc": (0.9, 1)},
    "ensemble": {"auc": (0.85, 1)},
    "systematics": {"saved": (0.4, 0.9)},
    "processors": {"passed": (100, 3500)},
}


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GALLERY)
        yield


def test_every_example_is_here() -> None:
    runnable = {
        p.stem for p in GALLERY.glob("*.py") if 'if __name__ == "__main__"' in p.read_text()
    }
    assert runnable - {"train"} == set(EXPECTED)
    assert all(len((GALLERY / f"{name}.py").read_text().splitlines()) <= 85 for name in EXPECTED)


def test_the_networks_are_small() -> None:
    files = list((GALLERY / "networks").iterdir())
    assert sum(p.stat().st_size for p in files) < 10_000_000
    # The exporter's notes of where it ran are left out.
    assert not [p.name for p in files if b"site-packages" in p.read_bytes()]


@pytest.mark.usefixtures("installation")
@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = importlib.import_module(name).run()
    for what, (least, most) in EXPECTED[name].items():
        assert least <= found[what] <= most, f"{what}: {found}"
    assert "equal" in capsys.readouterr().out or name in ("kfold", "systematics", "processors")


@pytest.fixture(scope="module")
def installation() -> Any:
    return ensure(extras=["xgboost"])
