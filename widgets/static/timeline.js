// The timeline: drag, wheel and keys move it; what is pointed at, or stepped to, is told.
import { make } from "./dom.js";
import { replace } from "./forms.js";
import { TimelineRecord } from "./timeline_columns.js";
import { TimelineCanvas } from "./timeline_canvas.js";

const TIMELINE_HELP =
  "drag: pan; wheel after a click, or with Ctrl: zoom. Keys: ← → pan, + − zoom, Home all, n p next and previous span, " +
  "↑ ↓ device, Enter details, Esc none";
const SHORTEST_VIEW_S = 2e-5;
const WIDTH_TO_STEP_TO = 3; // pixels: a child span that is narrower is passed over by n and p

export function mountTimeline(area, send) {
  const record = new TimelineRecord();
  const canvas = make("canvas", {
    class: "wb-tl-canvas", tabindex: "0", role: "application", "aria-roledescription": "timeline",
    "aria-label": `Timeline of devices. ${TIMELINE_HELP}`,
  });
  const tip = make("div", { class: "wb-tl-tip", hidden: "" });
  const legend = make("div", { class: "wb-tl-legend" });
  const live = make("div", { class: "wb-tl-live", "aria-live": "polite" }, "");
  const details = make("div", { class: "wb-tl-details" });
  const times = make("div", { class: "wb-tl-times", "data-scrolls": "" });
  const tools = make("div", { class: "wb-tl-tools" });
  for (const [sign, label, act] of [
    ["+", "zoom in", () => zoom(0.5)], ["−", "zoom out", () => zoom(2)], ["All", "show all", goHome],
  ]) {
    const control = make("button", { type: "button", "aria-label": label, title: label }, sign);
    control.addEventListener("click", act);
    tools.append(control);
  }
  tools.append(make("span", { class: "wb-tl-help" }, TIMELINE_HELP));
  const root = make("div", { class: "wb-tl" }, tools, legend, make("div", { class: "wb-tl-stage" }, canvas, tip));
  root.append(live, details, times);
  area.append(root);

  const view = new TimelineCanvas(canvas, record);
  let home = true; // all is in sight, also what is added
  let shownSections = "";
  let waiting = 0;
  let drag = null;

  function redraw() {
    waiting ||= requestAnimationFrame(() => {
      waiting = 0;
      if (!record.names) return;
      if (home) [view.from, view.to] = [0, record.length];
      const began = performance.now();
      if (!view.draw()) return;
      const ended = performance.now();
      Object.assign(root.dataset, {
        drawMs: (ended - began).toFixed(2), spans: record.spans.count, paintedAt: performance.timeOrigin + ended,
        from: view.from, to: view.to, marked: view.marked, chosen: view.chosen,
      });
    });
  }

  function goHome() {
    home = true;
    redraw();
  }

  function look(from, to) {
    const length = Math.min(Math.max(to - from, SHORTEST_VIEW_S), 1.2 * record.length);
    const middle = Math.min(Math.max((from + to) / 2, 0), record.length);
    [view.from, view.to] = [middle - length / 2, middle + length / 2];
    home = false;
    redraw();
  }

  const pan = (seconds) => look(view.from + seconds, view.to + seconds);

  function zoom(factor, about = (view.from + view.to) / 2) {
    look(about + (view.from - about) * factor, about + (view.to - about) * factor);
  }

  // --- what is pointed at ---

  const facts = (found) =>
    found.span === undefined ? record.tellGap(found.gap) : record.tellSpan(found.span, found.section);

  function choose(found) {
    view.chosen = found && found.span !== undefined ? found.span : -1;
    redraw();
    if (!found) return send("choose");
    live.textContent = facts(found).join(", ");
    if (found.span !== undefined) return send("choose", { span: found.span });
    const { lane, start, duration, cause } = record.gaps;
    const n = found.gap;
    send("choose", { gap: { lane: lane[n], start_s: start[n], end_s: start[n] + duration[n], cause: cause[n] } });
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function tell(event) {
    const [x, y] = point(event);
    const found = record.names ? view.under(x, y) : null;
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = facts(found).join("\n");
    const room = canvas.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(x + 12, room))}px`;
    tip.style.top = `${y + 16}px`;
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !record.names) return;
    drag = { at: point(event), from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return tell(event);
    const dx = point(event)[0] - drag.at[0];
    drag.moved ||= Math.abs(dx) > 3;
    if (!drag.moved) return;
    tip.hidden = true;
    const seconds = (-dx / view.plotWidth) * (drag.to - drag.from);
    look(drag.from + seconds, drag.to + seconds);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) choose(view.under(...point(event)));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("wheel", (event) => {
    if (!record.names || (document.activeElement !== canvas && !event.ctrlKey)) return;
    event.preventDefault();
    const [x] = point(event);
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX / view.plotWidth) * (view.to - view.from));
    else zoom(Math.exp(Math.max(-1, Math.min(event.deltaY / 300, 1))), view.seconds(x));
  }, { passive: false });

  // --- keys ---

  // Spans of a lane that can be stepped to, in time order: stages, and what is wide enough to be seen inside them.
  function stops(lane) {
    const { spans, sections, queue } = record;
    const least = ((view.to - view.from) / view.plotWidth) * WIDTH_TO_STEP_TO;
    const found = [];
    for (let i = 0; i < spans.count; i++) {
      if (spans.lane[i] !== lane || spans.kind[i] === queue) continue;
      if (spans.depth[i] > 0 && spans.duration[i] < least && i !== view.marked) continue;
      if (sections.some((section) => spans.start[i] < section.end && spans.start[i] + spans.duration[i] >= section.start)) {
        found.push(i);
      }
    }
    return found.sort((a, b) => spans.start[a] - spans.start[b] || spans.depth[a] - spans.depth[b]);
  }

  function sectionOf(i) {
    const { spans, sections } = record;
    const inside = (section) => spans.start[i] < section.end && spans.start[i] + spans.duration[i] >= section.start;
    return sections.find(inside) || sections[0];
  }

  function mark(i) {
    if (i === undefined) return;
    view.marked = i;
    const section = sectionOf(i);
    const start = record.spans.start[i] - section.start;
    const end = start + record.spans.duration[i];
    if (end < view.from || start > view.to) {
      const half = (view.to - view.from) / 2;
      look(start - half, start + half);
    }
    live.textContent = record.tellSpan(i, section).join(", ");
    redraw();
  }

  function step(by) {
    const { order } = record.names;
    const lane = view.marked < 0 ? order.find((number) => stops(number).length) : record.spans.lane[view.marked];
    if (lane === undefined) return;
    const all = stops(lane);
    const at = all.indexOf(view.marked);
    mark(all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(Math.max(at + by, 0), all.length - 1)]);
  }

  function changeLane(by) {
    const { order } = record.names;
    if (view.marked < 0) return step(1);
    const { spans } = record;
    const time = spans.start[view.marked];
    for (let at = order.indexOf(spans.lane[view.marked]) + by; at >= 0 && at < order.length; at += by) {
      const all = stops(order[at]).filter((i) => spans.depth[i] === 0);
      const nearest = (a, b) => (Math.abs(spans.start[b] - time) < Math.abs(spans.start[a] - time) ? b : a);
      if (all.length) return mark(all.reduce(nearest));
    }
  }

  const keys = {
    ArrowLeft: () => pan(-(view.to - view.from) / 10), ArrowRight: () => pan((view.to - view.from) / 10),
    "+": () => zoom(0.5, middleOfMark()), "=": () => zoom(0.5, middleOfMark()), "-": () => zoom(2, middleOfMark()),
    Home: goHome, n: () => step(1), p: () => step(-1), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
    Enter: () => view.marked >= 0 && choose({ span: view.marked, section: sectionOf(view.marked) }),
    Escape: () => { view.marked = -1; choose(null); },
  };
  keys[" "] = keys.Enter;

  function middleOfMark() {
    if (view.marked < 0) return undefined;
    const middle = record.spans.start[view.marked] + record.spans.duration[view.marked] / 2;
    const at = middle - sectionOf(view.marked).start;
    return at >= view.from && at <= view.to ? at : undefined;
  }

  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || !record.names) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  });

  details.addEventListener("click", (event) => {
    const asked = event.target.closest("[data-cell]");
    if (asked) live.textContent = goToCell(root, asked.dataset.cell, details.querySelector("pre").textContent);
  });

  // --- colours and sizes of the page ---

  const size = new ResizeObserver(redraw);
  size.observe(canvas.parentElement);
  const theme = new MutationObserver(() => { drawLegend(legend, record, view, true); redraw(); });
  for (const element of [document.body, document.documentElement]) theme.observe(element, { attributes: true });
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", redraw);

  return {
    draw(data, buffers) {
      if (!record.take(data, buffers)) return send("whole");
      const sections = JSON.stringify(data.sections.map(([title]) => title));
      if (sections !== shownSections) [home, shownSections] = [true, sections];
      view.chosen = data.chosen;
      if (view.marked >= record.spans.count || !data.order.includes(record.spans.lane[view.marked])) view.marked = -1;
      replace(details, data.details);
      replace(times, data.times);
      redraw();
      drawLegend(legend, record, view, false);
    },
    end() {
      size.disconnect();
      theme.disconnect();
      dark.removeEventListener("change", redraw);
      cancelAnimationFrame(waiting);
    },
  };
}

function drawLegend(legend, record, view, again) {
  if (!record.names) return;
  const { roles, kinds, causes } = record.names;
  const seen = kinds.filter(([kind], n) => record.kindsSeen.has(n) && kind !== "compute" && kind !== "queue");
  const key = JSON.stringify([roles, seen]);
  if (key === legend.dataset.key && !again) return;
  legend.dataset.key = key;
  const text = getComputedStyle(legend).color;
  const swatch = (fill, letter, ink, name) => {
    const tile = make("canvas", { width: "16", height: "14", "aria-hidden": "true" });
    const context = tile.getContext("2d");
    context.fillStyle = fill;
    context.fillRect(0, 0, 16, 14);
    context.fillStyle = ink;
    context.font = "bold 11px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillText(letter, 8, 11);
    return make("span", {}, tile, ` ${name}`);
  };
  legend.replaceChildren(
    ...roles.map(([role, colour, letter, ink]) => swatch(colour, letter, ink, role || "no role")),
    ...seen.map(([kind, hatch, ground]) => swatch(view.pattern(hatch, text, ground, 1), "", text, kind.replace("_", " "))),
    ...causes.map(([words, hatch, letter]) => swatch(view.pattern(hatch, text, 0.05, 0.4), letter, text, words)),
  );
}

// Bring the cell with a prompt `[n]:` into sight; what became of it, in a line.
function goToCell(from, number, code) {
  const notebook = from.closest(".jp-Notebook") || document;
  const prompts = [...notebook.querySelectorAll(".jp-InputPrompt")];
  const cells = prompts
    .filter((prompt) => prompt.textContent.trim() === `[${number}]:`)
    .map((prompt) => prompt.closest(".jp-Cell"));
  const begin = code.trim().split("\n")[0];
  const cell = cells.find((one) => one && one.textContent.includes(begin)) || cells[0];
  if (!cell) return `cell [${number}] is not in this page: its code is below`;
  cell.scrollIntoView({ block: "center" });
  cell.classList.add("wb-tl-found");
  setTimeout(() => cell.classList.remove("wb-tl-found"), 3000);
  return `cell [${number}] is in sight, outlined`;
}
