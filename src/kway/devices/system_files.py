"""Small files of ``/proc`` and ``/sys``, read without an error for what is not there."""

from pathlib import Path


def text(file: Path) -> str:
    """Return what the file holds, without white space around it; an empty text where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def number(file: Path) -> int | None:
    """Return the whole number that the file begins with, decimal or with ``0x``, or ``None``."""
    words = text(file).split()
    try:
        return int(words[0], 0)
    except (ValueError, IndexError):
        return None


def folders(parent: Path, pattern: str = "*") -> list[Path]:
    """List the folders in ``parent`` whose names fit, in the order of the numbers in their names."""
    try:
        found = [folder for folder in parent.glob(pattern) if folder.is_dir()]
    except OSError:
        return []
    digits = {folder: "".join(filter(str.isdigit, folder.name)) for folder in found}
    return sorted(found, key=lambda folder: (int(digits[folder] or 0), folder.name))


def properties(file: Path) -> dict[str, int]:
    """Read lines of a name and a whole number, as the driver of AMD GPUs writes them; others are left out."""
    found = {}
    for line in text(file).splitlines():
        name, _, value = line.strip().partition(" ")
        if value.strip().isdigit():
            found[name] = int(value)
    return found


def count_in_list(ranges: str) -> int:
    """Count what a list of the kernel such as ``0-3,8`` names."""
    count = 0
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            count += int(last) - int(first) + 1 if last.isdigit() else 1
    return count
