"""The notebooks of the examples run as they are, and what they show is right."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from tests.commands import run
from tests.scripts import python

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))

# What the numbers of the sample make of each; blanks stand for any, and for lines of tables.
EXPECTED = {
    "first_scores": ["objects scored 1,898 of 1,898"],
    "analysis_on_dask": [
        "{'QCD': 1008, 'TTbar': 1134}",
        "14,993 jets in 7 collections, 6,425 rows sent",
        "objects scored 14,993 of 14,993",
        "0 rows sent; 6,425 rows had their scores on disk",
    ],
    "shared_server": [
        "✓ declaration of toptagger: fits version 1",
        "the script ended with 0",
        *("QCD_1: 1,542 jets", "TTbar_1: 1,898 jets", "TTbar_2: 1,869 jets"),
        "objects scored 3,767 of 3,767",
        " lost unix:/",
    ],
    "your_own_model": [
        "3,405 jets; largest difference",
        "input 'features' is FP32 [N, 8], the model takes FP32 [N, 9]",
        "no field 'nConstituent'; did you mean 'nConstituents'?",
        "version 2: largest difference",
        "trees 2 better.ubj {'rounds': 60}",
    ],
}
RUN = """
import sys
from pathlib import Path
import nbformat

sys.path.insert(0, sys.argv[1])
from notebooks import execute

notebook = nbformat.read(sys.argv[2], as_version=4)
execute(notebook, Path.cwd())
nbformat.write(notebook, sys.argv[3])
"""


# What a loaded machine adds: dask may speak of a worker whose scheduler has just been closed, or
# that is told twice to remove a plugin, and a response that is late by the load has its request
# sent again.
OF_LOAD = re.compile(
    r"^.* Failed to communicate with scheduler during heartbeat\.\n(.*\n)*?.*CommClosedError: .*\n"
    r"|^.* Worker plugin .* failed to teardown\n(.*\n)*?KeyError: .*\n"
    r"|^no response in .* sent again\n"
    # A channel of another test whose server's port dask has got: "PRI * HT", read as a length.
    r"|^.* tornado\.application .*\n(.*\n)*?.*MemoryError: .*\b6073139462811505232\b.*\n",
    re.MULTILINE,
)


def shown(outputs: list[Any]) -> str:
    """Return the words of texts, pages and tables."""
    data = [output.get("data", {"text/plain": output.get("text", "")}) for output in outputs]
    texts = [each.get(kind, "") for each in data for kind in ("text/plain", "text/html")]
    words = html.unescape(re.sub(r"<[^>]*>", "", "\n".join(texts)))
    return re.sub(r"[\s│]+", " ", words)


def shape(cell: Any) -> list[Any]:
    """Return which kinds of output a cell has, but for bars of progress and what is logged."""
    kinds = [
        sorted(output["data"]) if "data" in output else output.get("name", output.output_type)
        for output in cell.get("outputs", [])
        if output.get("data", {}).get("text/plain", "shown") and output.get("name") != "stderr"
    ]
    kinds = [kind for kind in kinds if not any("widget" in part for part in kind)]
    # What is printed comes in as many parts as happens.
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


@pytest.mark.server
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_show_the_right_numbers(
    path: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    work.mkdir()
    scratch.mkdir()
    # The notebook's own way of drawing, not that of scripts.
    plain = {k: v for k, v in environment.items() if k != "MPLBACKEND"} | {
        "TMPDIR": str(scratch),
        # What dask says of a machine that is busy is no error of the notebook.
        "DASK_LOGGING__DISTRIBUTED": "error",
        "PYTHONWARNINGS": "ignore:Creating scratch directories is taking:UserWarning",
    }
    done = tmp_path / "done.ipynb"
    python(tmp_path / "run.py", DOCS, path, done, cwd=work, env=plain, timeout_s=500)
    cells = nbformat.read(done, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    warned = "".join(output.text for output in outputs if output.get("name") == "stderr")
    assert OF_LOAD.sub("", warned) == ""
    text = shown(outputs)
    assert [words for words in EXPECTED[path.stem] if words not in text] == []
    assert all(float(n) < 1e-5 for n in re.findall(r"largest difference (\S+)", text))
    kept = nbformat.read(path, as_version=4).cells
    hint = f"what {path.name} shows is of another day: run python docs/notebooks.py {path.stem}"
    assert [shape(cell) for cell in kept] == [shape(cell) for cell in cells], hint
    assert list(work.iterdir()) == []
    # dask keeps a folder of its own there.
    assert [path for path in scratch.iterdir() if path.name.startswith("tmp")] == []
    state = plain["SONIC_COFFEA_STATE_DIR"]
    assert json.loads(run("status", "--json", SONIC_COFFEA_STATE_DIR=state).stdout) == []
