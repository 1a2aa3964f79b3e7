from __future__ import annotations

import math

from workbench.batches.turns import chosen_mean, marked


def test_the_environments_part_is_marked() -> None:
    def decode(ids):
        return "".join(map(chr, ids))

    ids = [ord(letter) for letter in "ab42cd"]
    assert marked(ids, [True] * 6, decode) == "ab42cd"
    assert marked(ids, [True, True, False, False, True, True], decode) == "ab⟦42⟧cd"
    assert marked(ids, [False] * 2 + [True] * 4, decode) == "⟦ab⟧42cd"
    assert marked([], [], decode) == ""


def test_means_leave_out_what_the_policy_did_not_write() -> None:
    assert chosen_mean([1, 100, 3], [True, False, True]) == 2
    assert chosen_mean([1, 2], [True, False, True]) == 1.5  # of other tokens than the mask: those of the prompt
    assert chosen_mean([1, 2], None) == 1.5
    assert math.isnan(chosen_mean([1.0], [False]))
