"""What a notebook shows of models, pools, servers and calls; long calls that are interrupted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import nbformat
import pytest
from rich.progress import Progress
from tests.doubling import MODEL, jets
from tests.waiting import ctrl_c_in, until

import sonic_coffea as sonic
from docs.notebooks import execute
from sonic_coffea import errors
from sonic_coffea.pool import Pool, Settings
from sonic_coffea.testing import FakeServer


def test_a_pool_shows_its_servers(fake: FakeServer) -> None:
    with Pool(Settings.make(fake.url, retry_timeout_s=0.1)) as pool:
        assert "not used yet" in pool._repr_html_()
        MODEL(jets(*range(8)), pool=pool)
        assert "8 rows in 2 requests" in pool._repr_html_()
        assert "closed" in pool._repr_html_()
        fake.fail(grpc.StatusCode.UNAVAILABLE, "<gone>", times=100)
        with pytest.raises(errors.ServerLostError):
            MODEL(jets(*range(8)), pool=pool)
        assert "&lt;gone&gt;" in pool._repr_html_()


def test_a_local_server_shows_what_it_serves(server: sonic.LocalServer, repository: Path) -> None:
    assert "stopped" in sonic.LocalServer(repository)._repr_html_()
    page = server._repr_html_()
    assert server.url in page
    assert "tagger v1 READY" in page


def test_what_is_interrupted_is_not_lost(
    fake: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the call; the same call again sends what was not answered."""
    monkeypatch.setattr("sonic_coffea.model._pending._KEPT_WITHIN_S", 60.0)
    options: dict[str, Any] = {"cache": tmp_path / "scores", "cache_trusts_versions": True}
    with Pool(Settings.make(fake.url, max_in_flight=1, **options)) as pool:
        pending = MODEL.submit(jets(*range(2000)), pool=pool)
        until(lambda: fake.statistics["m", "rows"] >= 40)
        fake.hold()
        (call,) = (part.call for part in pending.parts)
        with pytest.raises(KeyboardInterrupt), ctrl_c_in(call):
            pending.result(progress=True)
        fake.release()
        before = fake.statistics["m", "rows"]
        again = MODEL.submit(jets(*range(2000)), pool=pool)
        assert again.result().twice.tolist() == [2.0 * n for n in range(2000)]
        assert again.statistics.cache_hits >= 30
        assert fake.statistics["m", "rows"] - before <= 2000 - 30


def test_a_bar_beside_another_does_not_end_the_call(fake: FakeServer) -> None:
    """Such as that of coffea; before 14.1, rich shows one at a time."""
    with Pool(Settings.make(fake.url)) as pool, Progress():
        assert MODEL.submit(jets(1, 2), pool=pool).result(progress=True).twice.tolist() == [2, 4]


MISSPELT = """
from coffea import processor
from coffea.nanoevents import NanoAODSchema
from distributed import Client
import sonic_coffea as sonic
from sonic_coffea.demo.samples import DATA
from sonic_coffea.testing import FakeModel, FakeServer

NanoAODSchema.warn_missing_crossrefs = False
model = sonic.Model("m", {"x": sonic.Row(["pt", "etaa"])}, {"y": ["top"]})

class Analysis(sonic.SonicProcessor, processor.ProcessorABC):
    models = {"m": model}

    def acquire(self, events):
        return {"m": events.FatJet}

    def produce(self, events, scores):
        return {"n": len(events)}

client = Client(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0")
server = FakeServer({"m": FakeModel.of(model)}).start()
pool = sonic.connect(server.url, client=client)
executor = processor.DaskExecutor(client=client, retries=0, status=False)
run = processor.Runner(executor, schema=NanoAODSchema)
files = {"QCD": {"treename": "Events", "files": [str(DATA / "QCD_1.root")]}}
"""


@pytest.mark.server
def test_errors_show_the_frames_of_users_and_name_their_methods() -> None:
    sources = MISSPELT, "run(files, Analysis())", 'model({"pt": [1.0]})', "client.close()"
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    execute(notebook, Path.cwd(), allow_errors=True)
    begin, on_dask, here, end = (cell.outputs for cell in notebook.cells)
    assert all(output.output_type != "error" for output in (*begin, *end)), begin
    for outputs in (on_dask, here):
        (error,) = (output for output in outputs if output.output_type == "error")
        shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
        assert "Cell In[" in shown
        # The last frame is shown whoever's it is: there the error is raised.
        assert len(re.findall(r"File \S*/sonic_coffea/", shown)) == 1
        assert "no field 'etaa'" in shown.splitlines()[-1]
    assert "in what Analysis.acquire sends to 'm'" in "".join(on_dask[-1].traceback)
