"""Devices as boxes: what they say, and that bars have one scale."""

from __future__ import annotations

import re

from workbench.display.devices import BARS, DeviceBox, DeviceMap, device_map
from workbench.telemetry.memory import MemoryReading


def test_bars_of_all_devices_have_one_scale() -> None:
    boxes = (
        DeviceBox("cuda:0", "policy-0", {"actor": {"parameters": 300, "optimizer": 100}}, 1000),
        DeviceBox("cuda:1", "scorers-0", {"critic": {"parameters": 200}, "reward": {"parameters": 0}}),
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


def test_machines_stand_under_each_other_where_there_are_several() -> None:
    def reading(host: str, machine: str) -> MemoryReading:
        return MemoryReading(time_s=0.0, iteration=0, host=host, device="cpu:0", machine=machine)

    readings = [reading("a-0", "m2"), reading("b-0", "m1"), reading("c-0", "m2")]
    html = device_map(readings, "now")._repr_html_()
    assert re.findall(r">(m\d|[abc]-0 on m\d)[,<]", html) == ["m1", "b-0 on m1", "m2", "a-0 on m2", "c-0 on m2"]
    alone = device_map([reading("a-0", "m2"), reading("b-0", "m2")], "now")._repr_html_()
    assert ">m2<" not in alone
