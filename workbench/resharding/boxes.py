"""Sets of elements of a weight as disjoint boxes: [row start, row stop) x [column start, column stop)."""

from __future__ import annotations

from collections.abc import Iterable

Box = tuple[int, int, int, int]
Boxes = tuple[Box, ...]


def size(boxes: Boxes) -> int:
    return sum((r1 - r0) * (c1 - c0) for r0, r1, c0, c1 in boxes)


def of(found: Iterable[Box]) -> Boxes:
    return tuple(box for box in found if box[0] < box[1] and box[2] < box[3])


def intersect(left: Boxes, right: Boxes) -> Boxes:
    return of((max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])) for a in left for b in right)


def subtract(left: Boxes, right: Boxes) -> Boxes:
    rest = left
    for cut in right:
        rest = tuple(piece for box in rest for piece in _outside(box, cut))
    return rest


def _outside(box: Box, cut: Box) -> Boxes:
    r0, r1, c0, c1 = box
    top, bottom = max(r0, cut[0]), min(r1, cut[1])
    left, right = max(c0, cut[2]), min(c1, cut[3])
    if top >= bottom or left >= right:
        return (box,)
    return of(((r0, top, c0, c1), (top, bottom, c0, left), (top, bottom, right, c1), (bottom, r1, c0, c1)))


def elements_of(boxes: Boxes, start: int, stop: int) -> Boxes:
    """Return elements [start, stop) of boxes that are flattened row by row, one box after the other; in that order."""
    found: list[Box] = []
    before = 0
    for box in boxes:
        low, high = max(start - before, 0), min(stop - before, size((box,)))
        if low < high:
            found += _run(box, low, high)
        before += size((box,))
    return tuple(found)


def _run(box: Box, low: int, high: int) -> Boxes:
    """Return elements [low, high) of one box: the end of a row, whole rows, the beginning of a row."""
    r0, _, c0, c1 = box
    width = c1 - c0
    (first, begin), (last, end) = divmod(low, width), divmod(high, width)
    if first == last:
        return ((r0 + first, r0 + first + 1, c0 + begin, c0 + end),)
    whole = first + (begin > 0)
    return of(
        (
            (r0 + first, r0 + whole, c0 + begin, c1),
            (r0 + whole, r0 + last, c0, c1),
            (r0 + last, r0 + last + 1, c0, c0 + end),
        )
    )
