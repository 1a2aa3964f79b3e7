// The panel: a tab a view. The kernel sends html, or data for a view's own script; controls send actions back.
import { enable, listen, replace } from "./forms.js";
import { make } from "./dom.js";
import { mountCharts } from "./chart.js";
import { mountItems } from "./items.js";
import { mountPlacement } from "./placement.js";
import { mountTimeline } from "./timeline.js";

// Views with a script of their own: `mount(area, send)` gives `{draw(data, buffers)}`.
const SCRIPTS = { conversation: mountItems, memory: mountCharts, metrics: mountCharts, placement: mountPlacement, samples: mountItems, timeline: mountTimeline };

const SILENT_S = 30; // without a word of the kernel, which says every 5 s that it is there
const GONE = "Disconnected: the kernel does not answer. Below is the last state that it sent.";

let panels = 0;

function render({ model, el }) {
  const number = ++panels;
  const titles = model.get("titles");
  const status = make("div", { class: "wb-status", role: "status", "aria-live": "polite" });
  const stop = make("button", { type: "button", class: "wb-stop" }, "Stop");
  const note = make("span");
  status.append(stop, note); // a button that does not move while the words beside it change
  const bar = make("div", { class: "wb-tabs", role: "tablist", "aria-label": "Views of the workbench" });
  const gone = make("div", { class: "wb-gone", role: "status" }, GONE, make("pre", {}, model.get("again")));
  const name = titles.length < 2 ? titles[0][1] : "Panel";
  const root = make("div", { class: "wb-panel", role: "region", "aria-label": `${name} of the workbench` }, gone, bar, status);
  // the picture that the cell keeps for a page without a kernel
  const hides = make("style", {}, model.get("hides"));
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
    sections[name] = { section, controls, area, script: script ? SCRIPTS[name] : null, mounted: null, number: 0 };
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

  let heard = Date.now();
  let lost = Boolean(el.closest(".jupyter-widgets-disconnected")); // of a saved notebook whose kernel has ended
  function listenOn() {
    root.classList.toggle("wb-silent", lost || Date.now() - heard > 1000 * SILENT_S);
  }
  // Jupyter says that the kernel ended, or began again, and would mark the widget itself, but anywidget takes that
  // listener away; what sticks is not in its cell anyway
  function cut() {
    lost = true;
    listenOn();
  }
  const listening = setInterval(listenOn, 1000);

  function receive(message, buffers) {
    heard = Date.now();
    if (message.kind === "alive") {
      // a drawing got lost on its way here, or could not be drawn: it is asked for again
      if (sections[message.view].number !== message.number) model.send({ act: "hello" });
      else if (message.answer) model.send({ act: "here" });
      return;
    }
    if (message.kind === "closed") {
      clearInterval(listening);
      model.off("comm_live_update", cut);
      root.classList.remove("wb-silent");
      hides.remove(); // the picture stays
      return;
    }
    if (message.kind === "status") {
      state = message;
    } else if (message.kind === "draw") {
      const view = sections[message.view];
      if (message.controls !== undefined) replace(view.controls, message.controls);
      if (!message.whole && message.number !== view.number + 1) model.send({ act: "hello" }); // one was missed
      else if (message.answer) model.send({ act: "here" });
      if (view.script) {
        if (!view.mounted) {
          view.area.replaceChildren();
          view.mounted = view.script(view.area, send(message.view));
        }
        view.mounted.draw(message.data, buffers);
      } else {
        replace(view.area, message.html);
      }
      view.number = message.number;
      view.section.dataset.drawn = String(Number(view.section.dataset.drawn || 0) + 1);
    }
    showStatus();
  }

  model.on("msg:custom", receive);
  model.on("change:shown", mark);
  model.on("comm_live_update", cut);
  mark();
  showStatus();
  el.append(...(lost ? [] : [hides]), root);
  listenOn();
  const unstick = model.get("sticks") ? stick(root, el) : () => {};
  model.send({ act: "hello" });
  return () => {
    unstick();
    model.off("msg:custom", receive);
    model.off("change:shown", mark);
    model.off("comm_live_update", cut);
    window.removeEventListener("keydown", own, true);
    clearInterval(listening);
    for (const { mounted } of Object.values(sections)) mounted?.end?.();
  };
}

// Keep `root` at the top of JupyterLab's notebook, in sight while that scrolls; on other pages it stays in its cell.
function stick(root, el) {
  root.classList.add("wb-strip");
  let waiting = setInterval(look, 100); // until its cell is in the page
  function look() {
    if (!el.isConnected) return;
    clearInterval(waiting);
    const scrolls = el.closest(".jp-Notebook")?.querySelector(".jp-WindowedPanel-outer");
    if (!scrolls) return;
    scrolls.querySelector(":scope > .wb-strip")?.dispatchEvent(new Event("wb-back")); // there is room for one
    scrolls.prepend(root);
  }
  root.addEventListener("wb-back", () => el.append(root));
  look();
  return () => {
    clearInterval(waiting);
    root.remove();
  };
}

// anywidget hands on no message of the kernel where this module took more than 2 s to load, as on a busy machine: they
// are taken as ipywidgets takes them, which waits for nothing.
async function hear(model) {
  const id = model.get("own");
  if (!model.widget_manager?.has_model?.(id)) return;
  const whole = await model.widget_manager.get_model(id);
  const ipywidgets = Object.getPrototypeOf(whole.constructor.prototype);
  whole.comm?.on_msg((message) => ipywidgets._handle_comm_msg.call(whole, message));
}

// The saved picture goes into the notebook's own outputs: an update by its display id reaches no page that was reloaded.
// Once for each page, also where the panel's cell is out of sight and is not drawn.
async function initialize({ model }) {
  await hear(model);
  const notebook = model.widget_manager?.context?.model; // JupyterLab's
  if (!notebook?.cells) return;
  model.on("msg:custom", ({ kind, kept }) => {
    if (kind === "saved") keepPictures(notebook, Object.entries(kept));
  });
  model.send({ act: "keeps" });
}

// kept: [mark, data by mimetype] of each; the mark is in the html that is there, or in the figure.
function keepPictures(notebook, kept) {
  for (const { outputs } of notebook.cells) {
    for (let n = 0; n < (outputs?.length ?? 0); n += 1) {
      const output = outputs.get(n).toJSON();
      const said = `${output.data?.["text/html"]} ${output.data?.["application/vnd.plotly.v1+json"]?.layout.meta}`;
      const [, data] = kept.find(([mark]) => said.includes(mark)) ?? [];
      if (data) outputs.set(n, { ...output, data });
    }
  }
}

export default { initialize, render };
