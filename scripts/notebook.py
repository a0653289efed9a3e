"""Run notebooks from their first cell to their last, and print what they print. The files stay as they are.

    python scripts/notebook.py examples/first_run.ipynb [...]

Each runs in a kernel of its own, in a folder that is gone afterwards. A cell that raises ends it, with its traceback.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

CELL_S = 120


def run(path: Path) -> nbformat.NotebookNode:
    """Return the notebook in ``path`` with the outputs of its cells. Raises ``nbclient``'s error of a cell."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", resources=resources).execute()
    return notebook


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """Return what each output of a cell shows as text."""
    return [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", [])]


def main() -> None:
    """Run the notebooks that the command line names."""
    for path in map(Path, sys.argv[1:]):
        print(f"\n{path}")
        for cell in run(path).cells:
            print("\n".join(text.rstrip() for text in texts(cell)))


if __name__ == "__main__":
    main()
