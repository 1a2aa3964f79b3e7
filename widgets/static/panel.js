// The panel: a tab a view. The kernel sends html, or data for a view's own script; controls send actions back.
import { enable, listen, replace } from "./forms.js";
import { make } from "./dom.js";
import { mountCharts } from "./chart.js";
import { mountPlacement } from "./placement.js";
import { mountSamples } from "./samples.js";
import { mountTimeline } from "./timeline.js";

// Views with a script of their own: `mount(area, send)` gives `{draw(data, buffers)}`.
const SCRIPTS = { memory: mountCharts, metrics: mountCharts, placement: mountPlacement, samples: mountSamples, timeline: mountTimeline };

let panels = 0;

function render({ model, el }) {
  const number = ++panels;
  const titles = model.get("titles");
  const status = make("div", { class: "wb-status", role: "status", "aria-live": "polite" });
  const stop = make("button", { type: "button", class: "wb-stop" }, "Stop");
  const note = make("span");
  status.append(stop, note); // a button that does not move while the words beside it change
  const bar = make("div", { class: "wb-tabs", role: "tablist", "aria-label": "Views of the workbench" });
  const root = make("div", { class: "wb-panel" }, bar, status);
  // JupyterLab handles keys before anything in the page does, and takes plain ones as its commands: arrows leave the
  // panel, letters add and delete cells. Those with Ctrl or Alt, such as to save, stay its own.
  const own = (event) => {
    if (!root.contains(event.target)) return;
    const plain = !event.ctrlKey && !event.metaKey && !event.altKey;
    if (plain) root.dataset.lmSuppressShortcuts = "true";
    else delete root.dataset.lmSuppressShortcuts;
  };
  window.addEventListener("keydown", own, true);
  root.addEventListener("keydown", (event) => {
    if (root.dataset.lmSuppressShortcuts) event.stopPropagation(); // other notebooks would react to them too
  });
  const tabs = {};
  const sections = {};
  let state = { blocked: "", busy: "", outcome: "", error: "" };

  const send = (view) => (act, given = {}) => model.send({ view, act, given });
  stop.addEventListener("click", () => model.send({ view: model.get("shown"), act: "stop" }));

  for (const [name, title, script] of titles) {
    const ids = [`wb-tab-${number}-${name}`, `wb-view-${number}-${name}`];
    const tab = make("button", { type: "button", role: "tab", id: ids[0], "aria-controls": ids[1] }, title);
    tab.addEventListener("click", () => turn(name));
    bar.append(tab);
    tabs[name] = tab;
    const controls = make("div", { class: "wb-controls" });
    const area = make("div", { class: "wb-picture" });
    area.append(make("p", { class: "wb-waiting" }, "asking the workbench ..."));
    const section = make("section", { role: "tabpanel", id: ids[1], "aria-labelledby": ids[0] }, controls, area);
    section.dataset.view = name;
    listen(section, send(name));
    root.append(section);
    sections[name] = { section, controls, area, script: script ? SCRIPTS[name] : null, mounted: null };
  }
  if (titles.length < 2) bar.hidden = true;
  bar.addEventListener("keydown", (event) => {
    const names = titles.map(([name]) => name);
    const at = names.indexOf(model.get("shown"));
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const name = names[(to + names.length) % names.length];
    turn(name);
    tabs[name].focus();
  });

  function turn(name) {
    model.set("shown", name);
    model.save_changes();
    mark();
  }

  function mark() {
    const shown = model.get("shown");
    for (const [name, tab] of Object.entries(tabs)) {
      tab.setAttribute("aria-selected", String(name === shown));
      tab.tabIndex = name === shown ? 0 : -1;
      sections[name].section.hidden = name !== shown;
    }
  }

  function showStatus() {
    const text = state.error || state.blocked || (state.busy && `${state.busy} ...`) || state.outcome;
    if (note.textContent !== text) note.textContent = text;
    status.dataset.kind = state.error ? "error" : state.blocked ? "blocked" : state.busy ? "busy" : "";
    stop.hidden = !state.busy;
    for (const { section } of Object.values(sections)) enable(section, state.blocked, state.busy);
  }

  function receive(message, buffers) {
    if (message.kind === "status") {
      state = message;
    } else if (message.kind === "draw") {
      const view = sections[message.view];
      if (message.controls !== undefined) replace(view.controls, message.controls);
      if (message.answer) model.send({ act: "here" });
      if (view.script) {
        if (!view.mounted) {
          view.area.replaceChildren();
          view.mounted = view.script(view.area, send(message.view));
        }
        view.mounted.draw(message.data, buffers);
      } else {
        replace(view.area, message.html);
      }
      view.section.dataset.drawn = String(Number(view.section.dataset.drawn || 0) + 1);
    }
    showStatus();
  }

  model.on("msg:custom", receive);
  model.on("change:shown", mark);
  mark();
  showStatus();
  el.append(root);
  model.send({ act: "hello" });
  return () => {
    model.off("msg:custom", receive);
    model.off("change:shown", mark);
    window.removeEventListener("keydown", own, true);
    for (const { mounted } of Object.values(sections)) mounted?.end?.();
  };
}

export default { render };
