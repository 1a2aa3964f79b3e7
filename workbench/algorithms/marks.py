"""Values of an algorithm's fields that can be told apart from equal ones: which argument comes from which field?"""

from __future__ import annotations

from typing import Any


class Mark:
    """Stands for the value of a field while `define` is traced. It computes and compares as the value does."""

    def __init__(self, value: Any) -> None:
        self.marked = value

    def __bool__(self) -> bool:
        return bool(self.marked)

    def __eq__(self, other: object) -> bool:
        return bool(self.marked == other)

    def __hash__(self) -> int:
        return hash(self.marked)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["marked"], name)

    def __deepcopy__(self, memo: Any) -> Any:
        return self


# numbers and texts compute as what they are; True and None cannot be subclassed
MARKED: dict[type, Any] = {
    kind: type(kind.__name__, (kind,), {"__deepcopy__": Mark.__deepcopy__}) for kind in (int, float, str)
}


def mark(value: Any) -> Any:
    """An object that stands for this value, and is no other."""
    made: Any = MARKED.get(type(value), Mark)(value)
    made.marked = value
    return made


def unmarked(value: Any) -> Any:
    """The value that a mark stands for; other values as they are."""
    kinds: Any = (Mark, *MARKED.values())
    return value.marked if isinstance(value, kinds) else value
