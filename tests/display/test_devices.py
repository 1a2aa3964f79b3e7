"""Devices as boxes: what they say, and that bars have one scale."""

from __future__ import annotations

import re

from workbench.display.devices import BARS, DeviceBox, DeviceMap, Share


def test_bars_of_all_devices_have_one_scale() -> None:
    boxes = (
        DeviceBox("cuda:0", "policy-0", (Share("actor", "parameters", 300), Share("actor", "optimizer", 100)), 1000),
        DeviceBox("cuda:1", "scorers-0", (Share("critic", "parameters", 200), Share("reward", "parameters", 0))),
    )
    shown = DeviceMap(boxes, "memory <now>")
    html = shown._repr_html_()
    bars = re.findall(r"<title>(.*?)</title><rect x=\"[\d.]+\" y=\"[\d.]+\" width=\"([\d.]+)\"", html)
    assert [(tip, float(width)) for tip, width in bars] == [
        ("actor, parameters: 300 bytes", 300 / 400 * BARS),
        ("actor, optimizer: 100 bytes", 100 / 400 * BARS),
        ("critic, parameters: 200 bytes", 200 / 400 * BARS),
    ]
    assert "400 B of 1.0 kB" in html
    assert ">reward</text>" in html, "a role that holds nothing is there all the same"
    assert "memory &lt;now&gt;" in html
    assert repr(shown) == "<DeviceMap of memory <now>: 2 devices, 600 B>"
