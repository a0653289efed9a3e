"""Numbers with units, for humans."""


def bytes_text(count: int | None) -> str:
    """Write a number of bytes in binary units: ``512 B``, ``1.5 KiB``, ``23.5 GiB``; ``?`` where unknown."""
    if count is None:
        return "?"
    if abs(count) < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        # 1023.95 would be written as 1024.0: that belongs to the next unit.
        if abs(value) < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} PiB"


def seconds_text(seconds: float) -> str:
    """Write a duration: ``12.3 us``, ``4.56 ms``, ``7.89 s``, ``2 min 05 s``, ``1 h 02 min``."""
    size = abs(seconds)
    if size < 0.9995e-3:
        return f"{seconds * 1e6:.1f} us"
    if size < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if size < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if abs(whole) < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
