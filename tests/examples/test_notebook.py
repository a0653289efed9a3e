"""The notebook of examples/ runs from its first cell to its last, in a kernel, and shows what it promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="nbclient runs the notebook: pip install '.[dev]'")
pytest.importorskip("ipykernel", reason="the notebook needs a kernel: pip install '.[dev]'")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/first_run.ipynb"
# Runs it in a process of its own, whose environment its kernel and the ranks inherit.
RUN = """
import json, sys
sys.path.insert(0, "scripts")
from notebook import run, texts
print(json.dumps([[cell.source, texts(cell), [out.output_type for out in cell.get("outputs", [])]]
                  for cell in run(sys.argv[1]).cells if cell.cell_type == "code"]))
"""


@pytest.mark.starts
def test_the_notebook_trains_proves_and_predicts(tmp_path):
    environ = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(NOTEBOOK)],
        cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)
    said = {source: (shown, kinds) for source, shown, kinds in cells}
    (progress, kinds) = next(found for source, found in said.items() if "progress=True" in source)
    # One output for the whole run, beside the value of the cell.
    assert kinds == ["display_data", "execute_result"]
    assert re.findall(r"^epoch +(\d+)/8 ", progress[0], re.M) == [str(n) for n in range(1, 9)]
    both = next(shown[0] for source, (shown, _) in said.items() if "alone" in source).splitlines()
    assert both[0].split()[1:] == both[1].split()[1:]
    assert [both[0].split()[0], both[1].split()[0]] == ["single", "data=2"]
    assert next(shown for source, (shown, _) in said.items() if "kway.prove" in source)[0].strip() == "pass"
    assert float(re.search(r"tensor\((.*)\)", cells[-1][1][0])[1]) > 0.5


def test_no_output_is_kept_in_the_file():
    import nbformat

    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
