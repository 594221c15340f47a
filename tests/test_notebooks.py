"""The notebooks run from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other crawl on a busy machine
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": path.parent}}).execute()
    text = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    rows = {
        line[:24].strip(): line.split()
        for line in text.splitlines()
        if line.startswith(("Native", "Retain", "Reweight"))
    }
    assert float(rows["Retain"][-1]) == 0.0
    assert all(float(rows[name][-1]) < 1e-5 for name in ("Reweight, per sample", "Reweight, streaming"))
    assert int(rows["Native"][1]) > int(rows["Retain"][1])
