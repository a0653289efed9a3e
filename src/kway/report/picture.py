"""A picture becomes a PNG file: without a display, and under its name once it is whole."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kway.errors import UsageError
from kway.records import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_png(figure: "Figure", path: Path) -> Path:
    """Write ``figure`` to ``path`` and return that. Raises ``UsageError`` where the file cannot be written."""
    # Matplotlib takes longer to import than the rest of the report; only a picture pays for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # On Agg directly: pyplot keeps figures in global state, and may ask for a display.
    canvas: Any = FigureCanvasAgg(figure)  # its writer of files has no types
    whole = BytesIO()
    try:
        canvas.print_png(whole, metadata={"Software": None})
        write_atomically(path, whole.getvalue())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    return path
