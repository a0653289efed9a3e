"""How an open text file divides its lines: what ``open`` was given as ``newline``, which the file does not tell."""

import gc
import io

_ENDS = (None, "", "\n", "\r", "\r\n")


def newline_of(file: io.TextIOWrapper) -> str | None:
    """Return the ``newline`` that a text file was opened with; the file stays at its place.

    CPython's garbage collector lists what such an object holds in one order: its encoding, ``newline`` where it is not
    ``None``, characters that were decoded ahead with the bytes that they are of, how errors are met. Raises
    ``ValueError`` where a list is not of this form, and ``OSError`` where ``tell`` does.
    """
    place = file.tell()
    takes_any = any(type(each) is io.IncrementalNewlineDecoder for each in gc.get_referents(file))
    between, decoded = _listed(file)
    if takes_any and decoded == b"" and len(between) == 1:
        # The text is `newline`, or what was decoded at the end of the file: that is gone once the place is gone to.
        file.seek(place)
        between, decoded = _listed(file)
        if decoded:
            between = between[:-1]
    elif decoded or (decoded is not None and len(between) == 2):
        between = between[:-1]
    newline = between[0] if between else None
    if len(between) > 1 or newline not in _ENDS or takes_any != (newline in (None, "")):
        raise ValueError("what ends its lines cannot be found out")
    return newline


def _listed(file: io.TextIOWrapper) -> tuple[list[str], bytes | None]:
    """Return the texts between encoding and errors, and the bytes that were decoded ahead, ``None`` where none were."""
    held = gc.get_referents(file)
    texts = [each for each in held if type(each) is str]
    ahead = [each for each in held if type(each) is tuple]
    if len(texts) < 2 or (texts[0], texts[-1]) != (file.encoding, file.errors) or len(ahead) > 1:
        raise ValueError("what ends its lines cannot be found out")
    return texts[1:-1], bytes(ahead[0][-1]) if ahead else None
