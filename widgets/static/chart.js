// Charts: plotly draws the figure that the kernel describes. A point that is clicked is what the view looks at.
import { make } from "./dom.js";
import { replace } from "./forms.js";

const CHART_BUTTONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud"] };
const ASK_AGAIN_MS = 2000; // the first time; then twice as long each time

export function mountCharts(area, send) {
  const notes = make("div");
  const box = make("div", { class: "wb-charts", role: "img", "aria-label": "charts; the same numbers as tables below" });
  const said = make("div", { class: "wb-said", "aria-live": "polite" });
  const below = make("div");
  area.append(notes, box, said, below);
  let plotly = null;
  let last = null;
  let asking = false;
  let over = false;

  function draw(data, buffers) {
    last = data;
    if (buffers.length) window.workbenchPlotly ||= loadPlotly(buffers[0]);
    replace(notes, data.notes);
    replace(below, data.below);
    box.hidden = !data.figure;
    if (plotly) plot();
    else if (window.workbenchPlotly) window.workbenchPlotly.then(take, fail);
    else if (!asking) ask(ASK_AGAIN_MS);
  }

  // Ask for plotly until it is here: a server may drop what is sent in a rush, and nothing else may be drawn meanwhile.
  function ask(again) {
    if (plotly || over) return;
    asking = true;
    if (window.workbenchPlotly) window.workbenchPlotly.then(take, fail);
    else send("library");
    setTimeout(ask, again, 2 * again);
  }

  function take(library) {
    if (plotly || over) return;
    plotly = library;
    plot();
  }

  function fail(error) {
    said.textContent = `No charts: plotly could not be loaded here (${error.message || error}). The tables below have their numbers.`;
  }

  function plot() {
    if (!last.figure) return;
    plotly.react(box, last.figure.data, last.figure.layout, CHART_BUTTONS);
    if (box.dataset.heard) return;
    box.dataset.heard = "yes";
    box.on("plotly_click", ({ points: [point] }) => {
      if (last.looks) send(last.looks, { x: point.x, source: point.data.meta || "" });
    });
  }

  const room = new ResizeObserver(() => plotly && box.data && area.offsetWidth && plotly.Plots.resize(box));
  room.observe(area);

  function end() {
    over = true;
    room.disconnect();
    plotly?.purge(box);
  }

  return { draw, end };
}

// plotly from its zipped source, as a module: the way in which the page has loaded this one.
async function loadPlotly(zipped) {
  const unzipped = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const source = await new Response(unzipped).text();
  const module = `const module = { exports: {} };\n${source}\nexport default module.exports;`;
  const url = URL.createObjectURL(new Blob([module], { type: "text/javascript" }));
  try {
    return (await import(/* webpackIgnore: true */ url)).default;
  } finally {
    URL.revokeObjectURL(url);
  }
}
