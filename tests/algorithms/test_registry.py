"""One list of algorithms, from which the package takes its public names."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import workbench as wb
import workbench.algorithms
from workbench.algorithms import ALGORITHMS
from workbench.algorithms.loop import Algorithm

BASES = {"Algorithm", "RolloutAlgorithm"}


def test_every_algorithm_is_public_under_its_name() -> None:
    for name, module in ALGORITHMS.items():
        found = getattr(wb, name)
        assert issubclass(found, Algorithm)
        assert not inspect.isabstract(found)
        assert (found.__name__, found.__module__) == (name, module)
        assert found is getattr(workbench.algorithms, name)
        assert name in wb.__all__


def test_every_file_with_an_algorithm_is_listed() -> None:
    folder = Path(workbench.algorithms.__file__).parent
    written = {
        (node.name, f"workbench.algorithms.{path.stem}")
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and {base.id for base in node.bases if isinstance(base, ast.Name)} & BASES
    }
    assert written == {*ALGORITHMS.items(), ("RolloutAlgorithm", "workbench.algorithms.loop")}
    tree = ast.parse((folder / "__init__.py").read_text())
    for_type_checkers = {
        (alias.name, node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(ALGORITHMS.items()) <= for_type_checkers


def test_every_reward_of_components_has_weights_that_can_be_changed() -> None:
    """`algo.reward_weights = {"format": 0.5}` holds for each call that scores with `algo.reward`."""
    scoring = {name for name in ALGORITHMS if "reward" in {field.name for field in fields(getattr(wb, name))}}
    assert {"PPO", "GRPO", "ArCHer"} <= scoring
    for name in scoring:
        text = inspect.getsource(getattr(wb, name))
        weights = {field.name: field for field in fields(getattr(wb, name))}["reward_weights"]
        assert (weights.type, weights.default) == ("Mapping[str, Weight] | None", None), name
        assert text.count("function=self.reward, weights=self.reward_weights)") == text.count(".compute_reward("), name
