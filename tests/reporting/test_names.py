"""Names that others choose are shown as they are, wherever they are shown, and do nothing else."""

from __future__ import annotations

import html
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import awkward as ak
import grpc
import matplotlib as mpl
import pytest
import rich
from rich.console import Console
from tests.commands import run

import sonic_coffea as sonic
from sonic_coffea import errors
from sonic_coffea.errors import printable
from sonic_coffea.reporting import Statistics, Tally
from sonic_coffea.testing import FakeModel, FakeServer
from sonic_coffea.transport import ModelStatistics

NAMES = {
    "markup": "[red]m[/red]",
    "end of no markup": "m[/]",
    "half a formula": "m$x_",
    "formula": "$x_{$",
    "formula of Bokeh": r"$$x$$ \(y\) \[z\]",
    "script": "<script>alert('m')</script>",
    "comment": "--><b>&amp;",
    "escapes": "\x1b[2J\x1b]0;m\x07",
    "C1": "\x9b2Jm",
    "line": "m\nERROR forged",
    "carriage return": "m\rforged",
    "right to left": "m\u202egpj",
    "underscore": "_m",
    "format": "{m} %s",
}
named = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


JETS = ak.Array([[{"pt": 1.0}]])


def is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text) and "\nERROR" not in text


def model_of(name: str) -> sonic.Model:
    return sonic.Model(name, {"x": sonic.Row(["pt"])}, {"y": [f"label {name}"]})


def report_of(*names: str) -> sonic.Report:
    """Return a report with slow tails and long queues, of which the advice names the servers."""
    statistics, timings = Statistics(objects=1000, elements=1), {}
    statistics.datasets.update({f"d {name}": 10 for name in names})
    for name in names:
        tally = Tally(rows=1000, requests=100)
        for number in range(100):
            tally.record_trip(0.001 if number < 98 else 1.0)
        statistics.record(f"s {name}", f"m {name}", f"1 {name}", tally)
        statistics.record(f"s {name}", name, "1", Tally(rows=1, requests=1))
        model = ModelStatistics(requests=10, queue_s=1.0, compute_s=0.1)
        timings[f"s {name}", f"m {name}", f"1 {name}"] = model
    return sonic.Report(statistics, wall_s=1.0, timings=timings)


def test_terminals_pages_and_files(tmp_path: Path) -> None:
    names, text = NAMES.values(), io.StringIO()
    report = report_of(*names)
    report.save(tmp_path / "report.html")
    Console(file=text, width=10_000, color_system=None).print(report)
    pages = report._repr_html_(), (tmp_path / "report.html").read_text()
    for shown in (text.getvalue(), *map(html.unescape, pages)):
        for name in map(printable, names):
            assert f"m {name} v1 {name}" in shown
            assert f"d {name}" in shown
            assert f"requests for m {name} v1 {name} on s {name} wait there" in shown
    assert not any(tag in page for tag in ("<script>", "<b>&amp;") for page in pages)
    assert all(is_harmless(page) for page in (text.getvalue(), *pages))
    report.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    models = [model for name in names for model in (name, f"m {name}")]
    assert sorted(s["model"] for s in saved["served"]) == sorted(models)
    assert is_harmless((tmp_path / "report.json").read_text())


def drawn(figure: Any) -> str:
    """Return the texts of a figure as they are drawn."""
    page = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(page, format="svg")
    return html.unescape(page.getvalue())


# matplotlib draws the others as any text.
IN_PLOTS = ("half a formula", "formula", "formula of Bokeh", "escapes", "line", "underscore")


def test_plots_of_a_report() -> None:
    names = [NAMES[key] for key in IN_PLOTS]
    shown = drawn(report_of(*names).plot())
    for text in map(printable, names):
        assert shown.count(f"m {text} v1 {text}") >= 2, text  # of a bar, and in a legend


def test_the_dashboard() -> None:
    from bokeh.document import Document
    from bokeh.models import DataTable

    from sonic_coffea.dask._dashboard import History, fill_page
    from sonic_coffea.dask._quotas import Allocator

    history, page = History(Allocator()), Document()
    names = sorted(NAMES.values())
    history.report({((f"s {n}", f"m {n}", "1"), "rows"): 1 for n in names}, {})
    fill_page(history, None, {}, page)
    cells = page.select_one({"type": DataTable}).source.data
    assert sorted(cells["Server"]) == sorted(f"s {printable(name)}" for name in names)
    assert sorted(cells["Model"]) == sorted(f"m {printable(name)} v1" for name in names)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server with a model of each name."""
    with FakeServer({name: FakeModel.of(model_of(name)) for name in NAMES.values()}) as server:
        yield server


def shows(printed: str, name: str) -> bool:
    """Whether a table shows a name, of which a narrow column is folded."""
    return "".join(printable(name).split()) in "".join(printed.split())


def test_commands_show_names_as_they_are(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for command in ("models", "check"):
        listed, as_json = run(command, server.url), run(command, server.url, "--json")
        assert listed.returncode == as_json.returncode == 0, listed.stderr
        assert all(shows(listed.stdout, name) for name in NAMES.values())
        assert is_harmless(listed.stdout)
        assert is_harmless(as_json.stdout)
    for name in (NAMES[key] for key in ("markup", "end of no markup", "escapes", "line")):
        bench = ("bench", "--seconds", "0.01", "--output", tmp_path / "curve.json")
        for command in (bench, ("check",)):
            shown = run(*command, "--", server.url, name)
            assert shown.returncode == 0, shown.stderr
            assert shows(shown.stdout, name)
            assert is_harmless(shown.stdout)
        missing = run("bench", "--", server.url, f"{name}?")
        assert missing.returncode == 1
        assert is_harmless(missing.stderr)


@named
def test_errors_and_logs(server: FakeServer, name: str, caplog: pytest.LogCaptureFixture) -> None:
    error = errors.RequestError(f"bad {name!r}: {name}", server=name, model=name, version=name)
    assert is_harmless(str(error).replace(": m\nERROR", ""))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert error.model == name
    with sonic.connect(server.url):
        server.fail(grpc.StatusCode.INVALID_ARGUMENT, name.replace("\n", " "))
        model_of(name)(JETS, on_error="mask")
    assert printable(name) in caplog.text
    assert all(is_harmless(message) for message in caplog.messages)


@named
def test_notebooks(server: FakeServer, name: str) -> None:
    model, text = model_of(name), io.StringIO()
    rich.reconfigure(file=text, width=300, force_terminal=True, color_system=None)
    with sonic.connect(server.url):
        pending = model.submit(JETS)
        pending.result(progress=True)
    rich.reconfigure()
    assert all(is_harmless(repr(thing)) for thing in (model, pending))
    assert printable(name) in text.getvalue()
    assert name.isprintable() or name not in text.getvalue()
