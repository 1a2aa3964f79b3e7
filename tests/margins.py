"""A pytest plugin: which share of its tolerance each comparison of floats used (1: all of it). `make margins`.

`python -m pytest -p tests.margins ...` appends to the file $MARGINS a line of JSON for each place in the tests, from
each process. `python -m tests.margins FILE` prints the places that used more than a third, and fails where there are
any: other processors round otherwise, and would use more.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

MOST = 1 / 3
ROOT = Path(__file__).resolve().parents[1]
# of torch.testing.assert_close, where none is given
DEFAULTS = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5)}
_used: dict[str, float] = {}


def _note(differences: torch.Tensor, tolerances: torch.Tensor) -> None:
    """Keep the largest share of the line of a test that is being run."""
    frame = sys._getframe(2)
    while not frame.f_code.co_filename.startswith(f"{ROOT}/tests/") or frame.f_code.co_filename == __file__:
        if frame.f_back is None:
            return
        frame = frame.f_back
    shares = torch.where(differences > 0, differences / tolerances, 0.0)
    share = float(shares[~shares.isnan()].max()) if bool((~shares.isnan()).any()) else 0.0
    if share > 1:  # meant to differ, or not yet there, or a failure that pytest reports
        return
    place = f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}"
    _used[place] = max(share, _used.get(place, 0.0))


def _compare(found: Any, expected: Any, rtol: float, atol: float) -> None:
    found, expected = (torch.as_tensor(side).detach().double().flatten() for side in (found, expected))
    if found.shape == expected.shape and found.numel():
        _note((found - expected).abs(), atol + rtol * expected.abs())


_assert_close, _assert_allclose = torch.testing.assert_close, np.testing.assert_allclose
_Approx = type(pytest.approx(1.0))
_equal = _Approx.__eq__


def _measured_close(actual: Any, expected: Any, **options: Any) -> None:
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and actual.is_floating_point():
        rtol, atol = DEFAULTS.get(actual.dtype, (1e-7, 1e-7))
        _compare(actual, expected, options.get("rtol", rtol), options.get("atol", atol))
    _assert_close(actual, expected, **options)


def _measured_allclose(actual: Any, desired: Any, rtol: float = 1e-7, atol: float = 0.0, **options: Any) -> None:
    _compare(actual, desired, rtol, atol)
    _assert_allclose(actual, desired, rtol=rtol, atol=atol, **options)


def _measured_equal(self: Any, actual: Any) -> bool:
    """Of one number; pytest compares the numbers of lists and dicts one by one in the same way."""
    if isinstance(actual, int | float | np.number) and isinstance(self.expected, int | float):
        tolerance = self.tolerance
        if 0 < tolerance < math.inf:
            _note(torch.tensor([abs(float(actual) - self.expected)]).double(), torch.tensor([tolerance]).double())
    return bool(_equal(self, actual))


def pytest_configure() -> None:
    torch.testing.assert_close = _measured_close
    np.testing.assert_allclose = _measured_allclose  # type: ignore[assignment]
    _Approx.__eq__ = _measured_equal  # type: ignore[method-assign]


def pytest_unconfigure() -> None:
    with open(os.environ.get("MARGINS", "margins.jsonl"), "a") as file:
        file.writelines(json.dumps([place, share]) + "\n" for place, share in _used.items())


def main(file: str) -> int:
    found: dict[str, float] = {}
    for place, share in map(json.loads, Path(file).read_text().splitlines()):
        found[place] = max(share, found.get(place, 0.0))
    near = sorted(((share, place) for place, share in found.items() if share > MOST), reverse=True)
    for share, place in near:
        print(f"{share:8.3f}  {place}")
    print(f"{len(found)} comparisons, {len(near)} of them used more than a third of their tolerance")
    return 1 if near or not found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
