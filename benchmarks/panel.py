"""Times the timeline of a live panel in a real JupyterLab and a real browser, and what a panel costs a run.

    python benchmarks/panel.py [--spans 1000 10000] [--run-seconds 30]

Spans of eight devices in two pools, written by a telemetry store, all in one window. For each count: from the cell's
start to the first paint, and from 200 more spans on disk to the paint that has them (a panel looks every 0.4 s); bytes
that went to the front end for the first paint and for the update; milliseconds from frame to frame while panning, with
everything in sight and zoomed in. Then the share of the kernel's time that the panel takes while a tiny PPO runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.telemetry import Span, TelemetryStore
from workbench_widgets import Driver, Panel, View
from workbench_widgets.timeline import TimelineView

UPDATE = 200
MICRO_BATCHES = 24
LANES = [("train", f"cpu:{n}") for n in range(4)] + [("rollout", f"cpu:{n}") for n in range(4, 8)]
STAGES = [
    ("generate_sequences", "rollout", "rollout", 4.0, ("generate",)),
    ("compute_log_prob", "actor", "train", 0.8, ("forward",)),
    ("compute_values", "critic", "train", 0.8, ("forward",)),
    ("update_critic", "critic", "train", 2.0, ("forward", "backward", "optimizer")),
    ("update_actor", "actor", "train", 2.5, ("forward", "backward", "communication", "optimizer")),
]


def iteration(number: int, start_s: float) -> Iterator[Span]:
    """The spans of one iteration: stages one after the other, later ranks a little slower."""
    at_s = start_s
    for position, (stage, role, pool, length_s, kinds) in enumerate(STAGES):
        devices = [device for its_pool, device in LANES if its_pool == pool]
        for rank, device in enumerate(devices):
            end_s = at_s + length_s * (1 + 0.05 * rank)
            run = number * len(STAGES) + position
            labels: dict[str, Any] = {"stage": stage, "run": run, "role": role, "pool": pool, "rank": rank}
            labels["device"] = device
            yield Span(**labels, kind="queue", start_s=at_s - 0.05, end_s=at_s)
            yield Span(**labels, kind="transfer", start_s=at_s, end_s=at_s + 0.04, bytes=120_000)
            step_s = (end_s - at_s - 0.04) / MICRO_BATCHES
            for n in range(MICRO_BATCHES):
                begin_s = at_s + 0.04 + n * step_s
                kind = kinds[n % len(kinds)]
                yield Span(
                    **labels, kind=kind, parent="compute", start_s=begin_s, end_s=begin_s + 0.9 * step_s, tokens=512
                )
            yield Span(**labels, kind="compute", start_s=at_s + 0.04, end_s=end_s, tokens=512 * MICRO_BATCHES)
        at_s += length_s * 1.15 + 0.2


def fill(store: TelemetryStore, count: int) -> None:
    """Record `count` spans, in whole iterations and a part of one."""
    spans: list[Span] = []
    number, start_s = 0, 1.7e9
    while len(spans) < count:
        spans += iteration(number, start_s)
        number, start_s = number + 1, start_s + 13.0
    store.append_spans(spans[:count])


class Measured(Panel):
    """A panel of one view that counts the bytes it sends."""

    def __init__(self, bench: Bench, view: View) -> None:
        super().__init__(bench.lab, [view], bench.driver)
        self.bench = bench

    def send(self, message: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self.bench.sent.append(len(json.dumps(message)) + sum(map(len, buffers)))
        super().send(message, buffers)


class Bench:
    """In the kernel: panels over stores of any size, and what they send."""

    def __init__(self, lab: Any) -> None:
        self.lab, self.driver, self.sent, self.began_s = lab, Driver(lab), [0], 0.0
        object.__setattr__(lab, "devices", lambda: LANES)

    def show(self, count: int) -> Any:
        """A panel of a store with so many spans."""
        self.began_s = time.time()
        self.sent.clear()
        object.__setattr__(self.lab, "telemetry", TelemetryStore(f"spans-{count}"))
        return Measured(self, TimelineView(self.lab, self.driver))

    def more(self) -> float:
        """Record `UPDATE` spans; the time at which they are on disk."""
        self.sent.clear()
        spans = iteration(10**6, self.lab.telemetry.spans()["end_s"].max() + 0.3)
        self.lab.telemetry.append_spans(span for _, span in zip(range(UPDATE), spans, strict=False))
        return time.time()


PAN = """
async (root) => {
  const stage = root.querySelector(".wb-tl-stage");
  stage.focus();
  const box = stage.getBoundingClientRect();
  const next = () => new Promise(requestAnimationFrame);
  const frames = [];
  let before = await next();
  for (let n = 0; n < 60; n++) {
    const at = { clientX: box.x + 300, clientY: box.y + 30, bubbles: true, cancelable: true };
    stage.dispatchEvent(new WheelEvent("wheel", { ...at, deltaX: n % 20 < 10 ? 40 : -40 }));
    const now = await next();
    await new Promise((resolve) => setTimeout(resolve, 0));
    frames.push(now - before);
    before = now;
  }
  return frames.slice(5);
}
"""
SETUP = """
from pathlib import Path
import workbench as wb
from benchmarks.panel import Bench
from tests.cases import tiny_lab
lab = tiny_lab("panel-benchmark", Path("runs"), backend="inline", if_exists="replace")
ppo = wb.PPO(lab, prompts=8, sampling=wb.Sampling(max_new_tokens=16))
ppo.run(1)


def iterate():
    while not panel.driver.stopping:
        ppo.run(1)


own = lab.telemetry
bench = Bench(lab)
"""
RUN = "del lab.devices; object.__setattr__(lab, 'telemetry', own); panel = lab.panel('timeline', algorithm=ppo); panel"


def measure(notebook: Any, cell: int, count: int) -> dict[str, Any]:
    """One row of the table."""
    root = notebook.run(cell, timeout_s=300).locator(".wb-tl")
    page = notebook.page

    def painted(spans: int) -> float:
        page.wait_for_function(
            "([root, count]) => Number(root.dataset.spans) === count",
            arg=[root.element_handle(), spans],
            timeout=300_000,
        )
        return float(root.get_attribute("data-painted-at")) / 1000

    first_s = painted(count) - notebook.ask("bench.began_s")
    first_bytes = notebook.ask("max(bench.sent)")
    page.wait_for_timeout(1500)
    on_disk_s = notebook.ask("bench.more()", timeout_s=120)
    update_s = painted(count + UPDATE) - on_disk_s
    page.wait_for_timeout(1000)
    update_bytes = notebook.ask("max(bench.sent)")
    all_in_sight = page.evaluate(f"([root]) => ({PAN})(root)", [root.element_handle()])
    root.locator(".wb-tl-stage").focus()
    for _ in range(5):
        page.keyboard.press("+")
    zoomed = page.evaluate(f"([root]) => ({PAN})(root)", [root.element_handle()])
    return {
        "spans": count, "first paint s": f"{first_s:.2f}", "update s": f"{update_s:.2f}",
        "first kB": f"{first_bytes / 1e3:,.0f}", "update kB": f"{update_bytes / 1e3:,.1f}",
        "all frame ms": _spread(all_in_sight), "zoomed frame ms": _spread(zoomed),
    }  # fmt: skip


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} (max {max(values):.1f})"


def main() -> None:
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.browser.notebook import CHROMIUM, Notebook, jupyter_lab

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, nargs="+", default=[1_000, 10_000])
    parser.add_argument("--run-seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    for count in arguments.spans:
        fill(TelemetryStore(folder / f"spans-{count}"), count)
    cells = [SETUP, *(f"bench.show({count})" for count in arguments.spans), RUN]
    with jupyter_lab(folder) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        notebook = Notebook(browser.new_page(viewport={"width": 1300, "height": 1000}), address, folder, cells)
        notebook.run(0, timeout_s=300)
        rows = [measure(notebook, cell, count) for cell, count in enumerate(arguments.spans, start=1)]
        widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]}
        print("  ".join(name.rjust(width) for name, width in widths.items()))
        for row in rows:
            print("  ".join(str(row[name]).rjust(width) for name, width in widths.items()))
        notebook.run(len(cells) - 1).locator(".wb-tl").wait_for(timeout=60_000)
        notebook.page.wait_for_timeout(2000)
        notebook.ask("panel.driver.start('iterations', iterate)")
        before = notebook.ask("(panel.work_s, lab.iteration)")
        began_s = time.monotonic()
        notebook.page.wait_for_timeout(1000 * arguments.run_seconds)
        after = notebook.ask("(panel.work_s, lab.iteration)")
        minutes = (time.monotonic() - began_s) / 60
        per_minute_s = (after[0] - before[0]) / minutes
        iterations = (after[1] - before[1]) / minutes
        print(f"kernel time of a live panel: {per_minute_s:.2f} s per minute of a run ({per_minute_s / 60:.1%}),")
        print(f"at {iterations:.0f} iterations of a tiny PPO per minute")
        notebook.ask("panel.driver.stop()")
        notebook.wait_for("not panel.driver.busy")
        notebook.close()
        browser.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
