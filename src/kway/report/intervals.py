"""Sets of points on a line of time, each a list of spans ``(begin, end)``: in order, apart from each other."""

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def union(*several: Iterable[tuple[float, float]]) -> Spans:
    """Return what lies in any of the spans, which may overlap and come in any order. Empty ones are left out."""
    found: Spans = []
    for begin, end in sorted(span for spans in several for span in spans if span[0] < span[1]):
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def both(a: Spans, b: Spans) -> Spans:
    """Return what lies in ``a`` and in ``b``, of which each is a union."""
    found: Spans = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(a: Spans, b: Spans) -> Spans:
    """Return what lies in ``a`` and not in ``b``, of which each is a union."""
    found: Spans = []
    j = 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(b) and b[k][0] < end:
            if at < b[k][0]:
                found.append((at, b[k][0]))
            at = b[k][1]
            k += 1
        if at < end:
            found.append((at, end))
    return found


def length(spans: Spans) -> float:
    """Return how much of the line a union covers."""
    return sum(end - begin for begin, end in spans)
