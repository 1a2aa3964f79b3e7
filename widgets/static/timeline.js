// The timeline: the kernel draws it as SVG; here drag, wheel and keys move it, and what is pointed at, or stepped to, is
// told. What is moved is the drawing that there is, until the kernel has drawn what is in sight now.
import { make } from "./dom.js";
import { replace } from "./forms.js";
import { mountFind } from "./timeline_find.js";

const TIMELINE_HELP =
  "drag: pan; with Shift: select a range; wheel after a click, or with Ctrl: zoom. Keys: ← → pan, + − zoom, Home all, " +
  "n p next and previous span, ↑ ↓ device, Enter details, / find, s select the marked span or what is in sight, " +
  "[ ] select from or up to it, Shift ← → move the end, f zoom to it, Esc none";
const SHORTEST_VIEW_S = 2e-5;
const WIDTH_TO_STEP_TO = 3; // pixels: a child span that is narrower is passed over by n and p
const REST_MS = 120; // without a move, until the kernel is asked to draw

export function mountTimeline(area, send) {
  const stage = make("div", {
    class: "wb-tl-stage", tabindex: "0", role: "application", "aria-roledescription": "timeline",
    "aria-label": `Timeline of devices. ${TIMELINE_HELP}`,
  });
  const picture = make("div");
  const tip = make("div", { class: "wb-tl-tip", hidden: "" });
  stage.append(picture, tip);
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
  const selector = make("button", { type: "button", "aria-pressed": "false", title: "drag to select a range" }, "Select");
  selector.addEventListener("click", () => {
    selecting = !selecting;
    selector.setAttribute("aria-pressed", String(selecting));
    stage.classList.toggle("wb-tl-selecting", selecting);
  });
  tools.append(selector);
  const finder = mountFind(tools, send, () => stage.focus());
  const help = make("div", { class: "wb-tl-help" }, TIMELINE_HELP);
  const sums = make("div", { class: "wb-tl-sums", "data-scrolls": "" });
  const root = make("div", { class: "wb-tl" }, tools, help, stage, live, sums, details, times);
  area.append(root);

  // Seconds here are as they are drawn: where time is folded, they are fewer than those of the axis.
  const view = { from: 0, to: 1 }; // seconds from the left edge of all, at both edges of what is in sight
  const shown = { from: 0, to: 1, length: 1 }; // the same of the drawing, and the longest section
  let home = true; // all is in sight, also what is added
  let marked = -1; // the span that the keyboard is on
  let chosen = -1;
  let asked = ""; // of the kernel, and not drawn yet
  let waiting = 0;
  let drawnWidth = 0;
  let drag = null;
  let selecting = false; // a drag selects also without Shift
  let range = null; // what is selected: seconds at both edges
  let rangeAsked = ""; // the range that the kernel has not added up yet
  let finds; // how often the kernel has gone to a match

  // --- what is in sight ---

  const plot = () => picture.querySelector(".wb-tl-plot");

  // Left edge and width of the plot in the page.
  function box() {
    const there = picture.firstChild.getBoundingClientRect();
    const scale = there.width / picture.firstChild.viewBox.baseVal.width;
    return { left: there.left + plot().x.baseVal.value * scale, width: plot().width.baseVal.value * scale };
  }

  function move() {
    const moves = picture.querySelector(".wb-tl-moves");
    if (!moves) return;
    const began = performance.now();
    const length = view.to - view.from;
    const scale = (shown.to - shown.from) / length;
    const shift = ((shown.from - view.from) / length) * plot().width.baseVal.value;
    moves.style.transform = Math.abs(scale - 1) < 1e-6 && Math.abs(shift) < 0.01 ? "" : `translate(${shift}px) scale(${scale}, 1)`;
    moves.style.setProperty("--wb-unscaled", 1 / scale);
    tell("drawMs", (performance.now() - began).toFixed(2));
  }

  function tell(name, value) {
    Object.assign(root.dataset, { from: view.from, to: view.to, marked, chosen, [name]: value });
  }

  // Ask the kernel for what is in sight, once it rests.
  function ask() {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      asked = String(Math.random());
      drawnWidth = stage.clientWidth;
      send("look", { asked, width: drawnWidth, view: home ? null : [view.from, view.to] });
    }, REST_MS);
    asked = "soon";
    root.dataset.asks = "1";
  }

  function goHome() {
    home = true;
    [view.from, view.to] = [0, shown.length];
    move();
    ask();
  }

  function look(from, to) {
    const length = Math.min(Math.max(to - from, SHORTEST_VIEW_S), 1.2 * shown.length);
    const middle = Math.min(Math.max((from + to) / 2, 0), shown.length);
    [view.from, view.to] = [middle - length / 2, middle + length / 2];
    home = false;
    move();
    ask();
  }

  const pan = (seconds) => look(view.from + seconds, view.to + seconds);

  function zoom(factor, about = (view.from + view.to) / 2) {
    look(about + (view.from - about) * factor, about + (view.to - about) * factor);
  }

  // --- a range ---

  function outlineRange() {
    picture.querySelector(".wb-tl-range")?.remove();
    root.dataset.range = range ? range.join(" ") : "";
    const moves = picture.querySelector(".wb-tl-moves");
    if (!range || !moves) return;
    const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const [width, length] = [plot().width.baseVal.value, shown.to - shown.from];
    const x = ((range[0] - shown.from) / length) * width;
    const y = (picture.querySelector("[data-lane]")?.getBBox().y || 0) - 26; // from the label of a break on
    for (const [name, value] of Object.entries({
      class: "wb-tl-range", x, y, width: ((range[1] - range[0]) / length) * width, height: "100%",
    })) box.setAttribute(name, value);
    moves.append(box);
  }

  // Take a range, in any order; the kernel adds it up.
  function select(edges) {
    range = edges && edges.map((at) => Math.min(Math.max(at, 0), shown.length)).sort((a, b) => a - b);
    if (range && range[1] - range[0] < SHORTEST_VIEW_S) range = null;
    outlineRange();
    rangeAsked = String(Math.random());
    root.dataset.asks = "1";
    send("select", { view: range, asked: rangeAsked });
  }

  const marks = () => (find(marked) ? edges(find(marked)) : [view.from, view.to]);

  function moveEnd(by) {
    const [from, to] = range || [view.from, (view.from + view.to) / 2];
    select([from, Math.max(to + (by * (view.to - view.from)) / 50, from + SHORTEST_VIEW_S)]);
  }

  function showRange() {
    const [from, to] = range || marks();
    look(from, to);
  }

  // --- what is pointed at ---

  const numberOf = (bar) => Number(bar.dataset.n);
  const bars = (lane) => [...lane.querySelectorAll(".span")];
  const find = (number) => picture.querySelector(`[data-n="${number}"]`);

  // What an element's title says: it is taken out of it, so that the browser does not tell it again.
  function facts(element) {
    const title = element.querySelector("title");
    if (title) {
      element.dataset.facts = title.textContent;
      title.remove();
    }
    return element.dataset.facts || "";
  }

  function outline() {
    for (const [name, number] of [["wb-tl-marked", marked], ["wb-tl-chosen", chosen]]) {
      for (const bar of picture.querySelectorAll(`.${name}`)) bar.classList.remove(name);
      if (number >= 0) find(number)?.classList.add(name);
    }
    tell("marked", marked);
  }

  // Bring the span that was searched for into sight, and tell it.
  function showMatch() {
    const bar = find(chosen);
    if (!bar) return;
    bar.scrollIntoView({ block: "nearest", inline: "nearest" });
    live.textContent = facts(bar).split("\n").join(", ");
  }

  function choose(found) {
    chosen = found?.dataset.n === undefined ? -1 : numberOf(found);
    outline();
    if (!found) return send("choose");
    live.textContent = facts(found).split("\n").join(", ");
    if (chosen >= 0) return send("choose", { span: chosen });
    const [start_s, end_s, cause] = found.dataset.gap.split(" ").map(Number);
    send("choose", { gap: { lane: Number(found.parentNode.dataset.lane), start_s, end_s, cause } });
  }

  const under = (event) => event.target.closest?.(".span, .gap, .fused");

  function point(event) {
    const found = under(event);
    tip.hidden = !found;
    if (!found) return;
    tip.textContent = facts(found);
    const place = stage.getBoundingClientRect();
    const room = stage.clientWidth - tip.offsetWidth - 4;
    tip.style.left = `${Math.max(0, Math.min(event.clientX - place.left + 12, room))}px`;
    tip.style.top = `${event.clientY - place.top + 16}px`;
  }

  function at(event) {
    const { left, width } = box();
    return view.from + ((event.clientX - left) / width) * (view.to - view.from);
  }

  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !plot()) return;
    const start = event.shiftKey || selecting ? at(event) : undefined; // of a range
    drag = { x: event.clientX, found: under(event), from: view.from, to: view.to, moved: false, start };
  });
  stage.addEventListener("pointermove", (event) => {
    if (!drag) return point(event);
    const dx = event.clientX - drag.x;
    if (!drag.moved && Math.abs(dx) > 3) {
      drag.moved = true;
      stage.setPointerCapture(event.pointerId);
    }
    if (!drag.moved) return;
    tip.hidden = true;
    if (drag.start !== undefined) {
      range = [drag.start, at(event)].sort((a, b) => a - b);
      return outlineRange();
    }
    const seconds = (-dx / box().width) * (drag.to - drag.from);
    look(drag.from + seconds, drag.to + seconds);
  });
  stage.addEventListener("pointerup", (event) => {
    if (drag?.moved && drag.start !== undefined) select([drag.start, at(event)]);
    else if (drag && !drag.moved && !drag.found?.classList.contains("fused")) choose(drag.found);
    drag = null;
  });
  stage.addEventListener("pointercancel", () => (drag = null));
  stage.addEventListener("pointerleave", () => {
    tip.hidden = true;
    if (!drag?.moved) drag = null;
  });
  stage.addEventListener("wheel", (event) => {
    if (!plot() || (document.activeElement !== stage && !event.ctrlKey)) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      return pan((event.deltaX / box().width) * (view.to - view.from));
    }
    zoom(Math.exp(Math.max(-1, Math.min(event.deltaY / 300, 1))), at(event));
  }, { passive: false });

  // --- keys ---

  // Seconds of a bar's edges.
  function edges(bar) {
    const [x, width] = [bar.x.baseVal.value, bar.width.baseVal.value];
    const seconds = (at) => shown.from + (at / plot().width.baseVal.value) * (shown.to - shown.from);
    return [seconds(x), seconds(x + width)];
  }

  // Bars of a lane that can be stepped to, in time order: stages, and what is wide enough to be seen inside them.
  function stops(lane) {
    const scale = (shown.to - shown.from) / (view.to - view.from);
    const wide = (bar) => bar.dataset.level === "0" || bar.width.baseVal.value * scale >= WIDTH_TO_STEP_TO;
    const found = bars(lane).filter((bar) => bar.dataset.level !== "3" && (wide(bar) || numberOf(bar) === marked));
    return found.sort((a, b) => edges(a)[0] - edges(b)[0] || a.dataset.level - b.dataset.level);
  }

  function mark(bar) {
    if (!bar) return;
    marked = numberOf(bar);
    const [start, end] = edges(bar);
    const half = (view.to - view.from) / 2;
    if (end < view.from || start > view.to) look(start - half, start + half);
    live.textContent = facts(bar).split("\n").join(", ");
    outline();
  }

  const lanes = () => [...picture.querySelectorAll("[data-lane]")].filter((lane) => stops(lane).length);

  function step(by) {
    const bar = find(marked);
    const lane = bar ? bar.parentNode : lanes()[0];
    if (!lane) return;
    const all = stops(lane);
    const at = all.indexOf(bar) + by;
    if (!bar) mark(all[by > 0 ? 0 : all.length - 1]);
    else if (at >= 0 && at < all.length) mark(all[at]);
    else if (!home) pan((by * (view.to - view.from)) / 2); // what follows is drawn then
  }

  function changeLane(by) {
    const bar = find(marked);
    if (!bar) return step(1);
    const all = lanes();
    const lane = all[all.indexOf(bar.parentNode) + by];
    const far = (one) => Math.abs(edges(one)[0] - edges(bar)[0]);
    if (lane) mark(stops(lane).filter((one) => one.dataset.level === "0").sort((a, b) => far(a) - far(b))[0]);
  }

  function middleOfMark() {
    const bar = find(marked);
    if (!bar) return undefined;
    const middle = (edges(bar)[0] + edges(bar)[1]) / 2;
    return middle >= view.from && middle <= view.to ? middle : undefined;
  }

  const keys = {
    ArrowLeft: () => pan(-(view.to - view.from) / 10), ArrowRight: () => pan((view.to - view.from) / 10),
    "+": () => zoom(0.5, middleOfMark()), "=": () => zoom(0.5, middleOfMark()), "-": () => zoom(2, middleOfMark()),
    Home: goHome, n: () => step(1), p: () => step(-1), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
    Enter: () => find(marked) && choose(find(marked)),
    "/": finder.focus, s: () => select(marks()), f: showRange,
    "[": () => select([marks()[0], range?.[1] ?? view.to]), "]": () => select([range?.[0] ?? view.from, marks()[1]]),
    Escape: () => { marked = -1; choose(null); select(null); },
  };
  keys[" "] = keys.Enter;

  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || !plot()) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.shiftKey && event.key === "ArrowLeft") moveEnd(-1);
    else if (event.shiftKey && event.key === "ArrowRight") moveEnd(1);
    else keys[event.key]();
  });

  details.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-cell]");
    if (cell) live.textContent = goToCell(root, cell.dataset.cell, details.querySelector("pre").textContent);
  });

  const size = new ResizeObserver(() => plot() && Math.abs(stage.clientWidth - drawnWidth) > 8 && stage.clientWidth && ask());
  size.observe(stage);

  return {
    draw(data) {
      const began = performance.now();
      picture.innerHTML = data.svg;
      [shown.from, shown.to] = data.view || [0, data.length_s || 1e-6];
      shown.length = data.length_s || 1e-6;
      if (asked === data.asked) asked = "";
      if (!asked) {
        home = !data.view; // also where another page of this panel has moved it
        [view.from, view.to] = [shown.from, shown.to];
      } else if (home) [view.from, view.to] = [0, shown.length];
      move();
      chosen = data.chosen;
      outline();
      if (rangeAsked === data.selected) rangeAsked = "";
      if (!rangeAsked && (!drag?.moved || drag.start === undefined)) range = data.range;
      outlineRange();
      finder.draw(data.search);
      if (finds !== undefined && finds !== data.search.finds) showMatch();
      finds = data.search.finds;
      replace(sums, data.sums);
      replace(details, data.details);
      replace(times, data.times);
      const ended = performance.now();
      root.dataset.spans = data.spans;
      root.dataset.asks = asked || rangeAsked ? "1" : ""; // "": at rest, what is drawn stays until something happens
      root.dataset.paintedAt = performance.timeOrigin + ended;
      tell("drawMs", (ended - began).toFixed(2));
      drawnWidth ||= picture.firstChild.viewBox.baseVal.width;
      if (Math.abs(stage.clientWidth - drawnWidth) > 8 && stage.clientWidth && !asked) ask();
    },
    end() {
      size.disconnect();
      clearTimeout(waiting);
      finder.end();
    },
  };
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
