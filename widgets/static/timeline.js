// The timeline: the kernel draws a window as SVG, with places as shares of its width; here drag, wheel and keys zoom and
// move it, and what is pointed at, or stepped to, is told.
import { make } from "./dom.js";
import { replace } from "./forms.js";

const TIMELINE_HELP =
  "drag: pan; with Shift: select a range; wheel after a click, or with Ctrl: zoom. Keys: ← → pan, + − zoom, Home all, " +
  "n p next and previous span, ↑ ↓ device, Enter details, s select the marked span or the visible range, Esc none. " +
  "Find spans by their text; Enter, n and p go through those found";
const MOST_ZOOM = 50; // as in workbench_widgets/timeline.py
const WIDTH_TO_STEP_TO = 3; // pixels: a child span that is narrower is passed over by n and p

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
    ["+", "zoom in", () => zoom(0.5)], ["−", "zoom out", () => zoom(2)], ["All", "show all", () => look(0, length)],
  ]) {
    const control = make("button", { type: "button", "aria-label": label, title: label }, sign);
    control.addEventListener("click", act);
    tools.append(control);
  }
  const wanted = make("input", { type: "search", "data-key": "find", placeholder: "find spans", "aria-label": "find spans" });
  tools.append(wanted);
  const help = make("div", { class: "wb-tl-help" }, TIMELINE_HELP);
  const sums = make("div", { class: "wb-tl-sums", "data-scrolls": "" });
  const root = make("div", { class: "wb-tl" }, tools, help, stage, live, sums, details, times);
  area.append(root);

  // Seconds here are as they are drawn: where time is folded, they are fewer than those of the axis.
  const view = { from: 0, to: 1 }; // at both edges of what is in sight, from the left edge of the picture
  let length = 1; // of the picture
  let shownWindow = "";
  let marked = -1; // the span that the keyboard is on
  let chosen = -1;
  let drag = null;
  let range = null; // what is selected

  // --- what is in sight ---

  const plot = () => picture.querySelector(".wb-tl-plot");
  const plotWidth = () => plot().width.baseVal.value;

  function fit() {
    const drawing = picture.firstChild;
    if (!plot() || !stage.clientWidth) return;
    drawing.removeAttribute("viewBox");
    drawing.setAttribute("width", stage.clientWidth);
    plot().setAttribute("width", Math.max(stage.clientWidth - plot().x.baseVal.value - 4, 1));
    move();
  }

  // Show what is in sight: a wider drawing, moved to the left; what has room now is seen, and names stay in sight.
  function move() {
    const moves = picture.querySelector(".wb-tl-moves");
    const wide = (length / (view.to - view.from)) * plotWidth();
    const left = (view.from / length) * wide;
    moves.setAttribute("x", -left);
    for (const name of moves.querySelectorAll('.words > [x$="px"]')) {
      const x = `${Math.max(2, left - (parseFloat(name.parentNode.getAttribute("x")) / 100) * wide + 2)}px`;
      if (name.getAttribute("x") !== x) name.setAttribute("x", x);
    }
    tell();
    if (moves.getAttribute("width") === String(wide)) return;
    moves.setAttribute("width", wide);
    for (const one of moves.querySelectorAll("[data-room]")) {
      one.style.display = one.dataset.room * wide < one.dataset.least ? "none" : "";
    }
  }

  function tell() {
    Object.assign(root.dataset, { from: view.from, to: view.to, marked, chosen, range: range ? range.join(" ") : "" });
  }

  function look(from, to) {
    const shown = Math.min(Math.max(to - from, length / MOST_ZOOM), length);
    const start = Math.min(Math.max((from + to - shown) / 2, 0), length - shown);
    [view.from, view.to] = [start, start + shown];
    if (plot()) move();
  }

  const pan = (seconds) => look(view.from + seconds, view.to + seconds);

  function zoom(factor, about = (view.from + view.to) / 2) {
    look(about + (view.from - about) * factor, about + (view.to - about) * factor);
  }

  // --- a range ---

  function outlineRange() {
    picture.querySelector(".wb-tl-range")?.remove();
    tell();
    if (!range || !plot()) return;
    const box = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const [x, width] = [(100 * range[0]) / length, (100 * (range[1] - range[0])) / length];
    for (const [name, value] of Object.entries({ class: "wb-tl-range", x: `${x}%`, width: `${width}%`, height: "100%" })) {
      box.setAttribute(name, value);
    }
    picture.querySelector(".wb-tl-moves").append(box);
  }

  // Take a range, in any order; the kernel adds it up.
  function select(edges) {
    range = edges && edges.map((at) => Math.min(Math.max(at, 0), length)).sort((a, b) => a - b);
    outlineRange();
    send("select", { view: range });
  }

  // --- what is pointed at ---

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
    tell();
  }

  function choose(found) {
    chosen = Number(found?.dataset.n ?? -1);
    outline();
    if (!found) return send("choose");
    live.textContent = facts(found).split("\n").join(", ");
    if (chosen >= 0) return send("choose", { span: chosen });
    const [start_s, end_s, cause] = found.dataset.gap.split(" ").map(Number);
    send("choose", { gap: { lane: Number(found.parentNode.dataset.lane), start_s, end_s, cause } });
  }

  const under = (event) => event.target.closest?.(".span, .gap");

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
    return view.from + ((event.clientX - plot().getBoundingClientRect().left) / plotWidth()) * (view.to - view.from);
  }

  stage.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !plot()) return;
    drag = { x: event.clientX, found: under(event), ...view, moved: false, start: event.shiftKey ? at(event) : undefined };
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
    const seconds = (-dx / plotWidth()) * (drag.to - drag.from);
    look(drag.from + seconds, drag.to + seconds);
  });
  stage.addEventListener("pointerup", (event) => {
    if (drag?.moved && drag.start !== undefined) select([drag.start, at(event)]);
    else if (drag && !drag.moved) choose(drag.found);
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
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return pan((event.deltaX / plotWidth()) * (view.to - view.from));
    zoom(Math.exp(Math.max(-1, Math.min(event.deltaY / 300, 1))), at(event));
  }, { passive: false });

  // --- what is searched for ---

  const inTime = (a, b) => edges(a)[0] - edges(b)[0] || a.dataset.level - b.dataset.level;

  // Bars that tell all the words, in time order, on any device; none where nothing is searched for.
  function matches() {
    const words = wanted.value.toLowerCase().split(/\s+/).filter(Boolean);
    const tells = (bar) => words.every((word) => facts(bar).toLowerCase().includes(word));
    return words.length ? [...picture.querySelectorAll('.span:not([data-level="3"])')].filter(tells).sort(inTime) : [];
  }

  function outlineMatches() {
    picture.classList.toggle("wb-tl-searched", Boolean(wanted.value.trim()));
    for (const bar of picture.querySelectorAll(".wb-tl-match")) bar.classList.remove("wb-tl-match");
    const found = matches();
    for (const bar of found) bar.classList.add("wb-tl-match");
    return found.length;
  }

  wanted.addEventListener("input", () => {
    const found = outlineMatches();
    live.textContent = wanted.value.trim() ? `${found} of the drawn spans match` : "";
  });
  wanted.addEventListener("keydown", (event) => event.key === "Enter" && plot() && step(event.shiftKey ? -1 : 1));

  // --- keys ---

  // Seconds of a bar's edges.
  function edges(bar) {
    const [x, width] = [bar.x.baseVal, bar.width.baseVal].map((one) => (one.valueInSpecifiedUnits / 100) * length);
    return [x, x + width];
  }

  // Bars of a lane that can be stepped to, in time order: stages, and what is wide enough to be seen inside them.
  function stops(lane) {
    const wide = (bar) => bar.dataset.level === "0" || bar.width.baseVal.value >= WIDTH_TO_STEP_TO;
    return [...lane.querySelectorAll(".span")]
      .filter((bar) => bar.dataset.level !== "3" && (wide(bar) || Number(bar.dataset.n) === marked))
      .sort(inTime);
  }

  function mark(bar) {
    if (!bar) return;
    marked = Number(bar.dataset.n);
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
    const all = wanted.value.trim() ? matches() : stops(lane);
    mark(all.includes(bar) ? all[all.indexOf(bar) + by] : all.at(by > 0 ? 0 : -1));
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
    const [start, end] = find(marked) ? edges(find(marked)) : [view.from, view.to];
    return start <= view.to && end >= view.from ? (start + end) / 2 : undefined;
  }

  const keys = {
    ArrowLeft: () => pan(-(view.to - view.from) / 10), ArrowRight: () => pan((view.to - view.from) / 10),
    "+": () => zoom(0.5, middleOfMark()), "=": () => zoom(0.5, middleOfMark()), "-": () => zoom(2, middleOfMark()),
    Home: () => look(0, length), n: () => step(1), p: () => step(-1), ArrowUp: () => changeLane(-1), ArrowDown: () => changeLane(1),
    Enter: () => find(marked) && choose(find(marked)),
    s: () => select(find(marked) ? edges(find(marked)) : [view.from, view.to]),
    Escape: () => { marked = -1; choose(null); select(null); },
  };
  keys[" "] = keys.Enter;

  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || !plot()) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  });

  details.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-cell]");
    if (cell) live.textContent = goToCell(root, cell.dataset.cell, details.querySelector("pre").textContent);
  });

  const size = new ResizeObserver(fit);
  size.observe(stage);

  return {
    draw(data) {
      const home = shownWindow !== data.window || view.to - view.from >= length; // all is in sight, also what is added
      [length, shownWindow, chosen] = [data.length_s || 1e-6, data.window, data.chosen];
      picture.innerHTML = data.svg;
      look(home ? 0 : view.from, home ? length : view.to);
      fit();
      outline();
      outlineMatches();
      if (!drag?.moved) range = data.range;
      outlineRange();
      replace(sums, data.sums);
      replace(details, data.details);
      replace(times, data.times);
      root.dataset.spans = data.spans;
    },
    end: () => size.disconnect(),
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
  return `cell [${number}] is shown, outlined`;
}
