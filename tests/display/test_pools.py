"""Pools as boxes: what they say, and that nothing of a name is taken for html."""

from __future__ import annotations

import re

from workbench.display.devices import box, card
from workbench.display.palette import role_styles


def test_cards_say_role_model_and_what_becomes_of_them() -> None:
    styles = role_styles(["actor", "critic"])
    cards = [
        card("actor", styles["actor"], ("<model>", "p=1 t=2 d=1")),
        card("critic", styles["critic"], ("m", ""), note="moves from scorers"),
    ]
    html = box("policy", ("cuda:0", "cuda:1"), cards)
    text = re.sub("<[^>]*>", " ", html)
    for told in ("policy", "2 devices", "cuda:1", " A ", "&lt;model&gt;", "p=1 t=2 d=1", "moves from scorers"):
        assert told in text
    assert "class=" not in html, "a saved notebook has no style sheet"
