"""Which kernel drives a workbench, and whether it is open."""

from __future__ import annotations

import secrets

from workbench.backends import registry
from workbench.config.description import Description
from workbench.errors import NotDriving, NotFound


class Ownership:
    """This kernel's hold on a workbench.

    controller: names this handle: two handles never give a shard the same name. recorded: whether the workbench is in
    the registry, where another kernel may take it over. closed: the handle was closed.
    """

    def __init__(self, description: Description) -> None:
        self.controller = secrets.token_hex(4)
        self.closed = self.recorded = False
        self._name, self._id = description.name, description.id
        self._watches = False
        self._stamp: int | None = None  # of the registry's word of the owner, when it was last read

    @property
    def drives(self) -> bool:
        """Whether this kernel drives the workbench; a kernel from which it was taken over never drives it again."""
        if self.recorded and not self._watches:
            stamp = registry.owner_stamp(self._id)
            if stamp != self._stamp:
                owner, self._stamp = registry.owner(self._id), stamp
                if owner is not None and owner.controller != self.controller:
                    self.watch()
        return not self._watches

    @property
    def watches(self) -> bool:
        """Whether another kernel drives it, as far as is known without asking the registry."""
        return self._watches

    def watch(self) -> None:
        """Only look from now on: another kernel drives it."""
        self._watches = True

    def take(self) -> None:
        """Record that this kernel drives it."""
        registry.own(self._id, self.controller)

    def check_open(self) -> None:
        """Raise `NotFound` where it is closed."""
        if self.closed and self._watches:
            again = (
                f"wb.attach({self._name!r}) looks again, wb.attach({self._name!r}, take_over=True) drives it from here"
            )
            raise NotFound(f"this notebook has left {self._name!r}", "another kernel drives it", again)
        if self.closed:
            raise NotFound(f"workbench {self._name!r} is closed", "", "open it again with wb.open(...)")

    def check_drives(self) -> None:
        """Raise `NotDriving` where another kernel drives it."""
        if not self.drives:
            owner = registry.owner(self._id)
            who = "another kernel" if owner is None else f"process {owner.process.pid} on {owner.process.machine}"
            raise NotDriving(
                f"this notebook looks at {self._name!r}", f"{who} drives it, and the steps of two would mix",
                f"wb.attach({self._name!r}, take_over=True) drives it from here",
            )  # fmt: skip
