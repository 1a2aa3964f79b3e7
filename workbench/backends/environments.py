"""Checks that the other machines of a cluster have the same code, because hosts import it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import MissingDependency
from workbench.support.code_version import code_version

SHOWN, ANSWER_S = 3, 60.0
DATA = "datasets/"  # only the controller reads them, and the link to them is not shipped
REMEDY = (
    "install the same versions on that machine, by a lock file or an image; or let Ray send the code: ray.init(address,"
    " runtime_env={'py_modules': [workbench]}) before you open the workbench, see docs/clusters.md"
)


def need_same(ray: Any, machines: Mapping[str, str], runtime_env: Mapping[str, Any]) -> None:
    """Raise `MissingDependency` where a machine lacks this package, or has other versions of the computing libraries,
    or other files of this package. machines: their names by the id of their Ray node. runtime_env: of hosts."""

    if not machines:
        return

    def look() -> dict[str, Any]:  # an inner function is pickled by value
        from workbench.support.code_version import code_version

        return code_version()

    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    task, mine = ray.remote(num_cpus=0, max_retries=0, runtime_env=runtime_env)(look), code_version()
    asked = {node: task.options(scheduling_strategy=affinity(node, soft=False)).remote() for node in machines}
    for node, answer in asked.items():
        where = f"machine {machines[node]}"
        try:
            theirs = ray.get(answer, timeout=ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ImportError):
                raise
            raise MissingDependency(
                f"{where}: {error.cause}", "hosts must import the modules that this process imports", REMEDY
            ) from None
        except ray.exceptions.RayError:  # the machine has ended: the start of its hosts will raise the error
            continue
        if differing := _differing(mine, theirs):
            raise MissingDependency(
                f"{where} has other code than this process: {differing}",
                "all ranks of a workbench must run the same code", REMEDY,
            )  # fmt: skip


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    here, there = _builds(mine["versions"]), _builds(theirs["versions"])
    found = [
        f"{name} {there[name]} (here {here[name]})"
        for name in sorted(here.keys() & there.keys())  # a missing library is reported where it is needed
        if here[name] != there[name]
    ]
    mine, theirs = ({n: d for n, d in of["files"].items() if not n.startswith(DATA)} for of in (mine, theirs))
    files = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if files:
        more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
        found.append(f"workbench/{', workbench/'.join(files[:SHOWN])}{more} differ")
    return "; ".join(found)


def _builds(versions: Mapping[str, str]) -> dict[str, str]:
    """Return versions of libraries without the marks of CPU or GPU builds."""
    return {n.removesuffix("-cpu"): text.partition("+")[0] for n, text in versions.items() if n != "workbench"}
