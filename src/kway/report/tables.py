"""Aligned plain-text tables."""

from collections.abc import Sequence

GAP = "  "
ABSENT = "-"


def _cell(value: object) -> str:
    return ABSENT if value is None else str(value).replace("\n", " ")


def _is_number(cell: str) -> bool:
    """Whether a cell reads as a number, perhaps with digit groups (1,024) or a unit (3.1 ms)."""
    first = cell.split(" ", 1)[0].replace(",", "").rstrip("%")
    try:
        float(first)
    except ValueError:
        return False
    return len(cell.split()) <= 2


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table as text: one line of headings, one line a row, no line break at the end.

    Columns whose cells all read as numbers are aligned to the right, their headings too; ``None`` prints as
    ``-`` and fits either kind. Numbers are printed as ``str`` gives them: the caller chooses the digits.
    Raises ``ValueError`` where a row has not as many cells as there are headings.
    """
    for row in rows:
        if len(row) != len(headings):
            raise ValueError(f"a row of {len(row)} cells under {len(headings)} headings: {list(row)}")
    columns = [[_cell(row[index]) for row in rows] for index in range(len(headings))]
    aligned = []
    for heading, cells in zip(headings, columns, strict=True):
        width = max(len(cell) for cell in [heading, *cells])
        filled = [cell for cell in cells if cell != ABSENT]
        right = bool(filled) and all(_is_number(cell) for cell in filled)
        aligned.append([cell.rjust(width) if right else cell.ljust(width) for cell in [heading, *cells]])
    return "\n".join(GAP.join(line).rstrip() for line in zip(*aligned, strict=True))
