"""Executes the notebooks in docs/examples and stores their outputs, from which the site is built.

``python docs/notebooks.py [NAME…]`` executes them in an empty directory each. Nothing of a machine is stored: no paths,
no times of cells, no versions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parent / "examples"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}


def executed(path: Path, directory: Path) -> nbformat.NotebookNode:
    """Execute a notebook in a directory and return it with its outputs; an error of a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, timeout=300, resources=resources, record_timing=False).execute()
    return cleaned(notebook)


def cleaned(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return a notebook without what differs between machines, and with numbered cells."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
    nbformat.validate(notebook)
    return notebook


def main(names: list[str]) -> None:
    """Execute and store the named notebooks, or all."""
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if not names or path.stem in names:
            with TemporaryDirectory() as directory:
                notebook = executed(path, Path(directory))
            nbformat.write(notebook, path)
            print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
