// Charts: plotly's where the page can have it, else the svg that the kernel sends. A point that is chosen, by a click or
// by the arrow keys and Enter, is what the view looks at.
import { make } from "./dom.js";

const CHART_DASHES = { "": "solid", "6 3": "6px,3px", "2 3": "2px,3px", "8 3 2 3": "8px,3px,2px,3px", "1 4": "1px,4px" };

// Over a plot: its title, its note, and a row with the unit at the left and plotly's buttons at the right.
const CHART_TITLE = 20;
const CHART_NOTE = 15;
const CHART_ROW = 24;
const CHART_ROWS = 50; // of a table

let chartSheets = 0;

export function mountCharts(area, send) {
  const number = ++chartSheets;
  const notes = make("div");
  const key = make("div", { class: "wb-key" });
  const sheet = make("div", { class: "wb-charts" });
  const said = make("div", { class: "wb-said", "aria-live": "polite" });
  const tables = make("details", {}, make("summary", {}, "These charts as tables"));
  tables.addEventListener("toggle", showTables);
  const below = make("div");
  area.append(notes, key, sheet, said, tables, below);
  const boxes = new Map();
  let charts = [];
  let looks = "";
  let still = "";
  let keyOfAll = "";
  let plotly = null;
  let asked = false;
  let over = false;

  function draw(data, buffers) {
    if (buffers.length && !window.workbenchPlotly) window.workbenchPlotly = loadPlotly(buffers[0]);
    if (!data.whole && !data.charts.every((chart, n) => goesOn(charts[n], chart))) return send("whole");
    charts = data.whole ? data.charts : data.charts.map((chart, n) => withPoints(charts[n], chart));
    looks = data.looks;
    still = data.still === null ? still : ownPatterns(data.still, number);
    keyOfAll = ownPatterns(data.key, number);
    notes.innerHTML = data.notes;
    tables.hidden = !charts.length;
    showTables();
    if (below.dataset.html !== data.below) below.innerHTML = below.dataset.html = data.below;
    if (plotly) {
      key.innerHTML = keyOfAll;
      return plot();
    }
    sheet.innerHTML = still; // it has its own key
    if (window.workbenchPlotly) wait();
    else if (!asked) {
      asked = true;
      send("library");
    }
  }

  function showTables() {
    if (tables.open) tables.replaceChildren(tables.firstChild, ...charts.map(chartTable));
  }

  function wait() {
    window.workbenchPlotly.then(
      (library) => {
        if (plotly || over) return;
        plotly = library;
        sheet.replaceChildren();
        key.innerHTML = keyOfAll;
        plot();
      },
      (error) => {
        if (said.textContent) return;
        said.textContent = `Still pictures: plotly could not be loaded here (${error.message || error}).`;
        send("stills");
      },
    );
  }

  function plot() {
    const titles = charts.map((chart) => chart.title);
    for (const [title, box] of boxes) {
      if (titles.includes(title)) continue;
      room.unobserve(box);
      plotly.purge(box);
      box.remove();
      boxes.delete(title);
    }
    for (const chart of charts) {
      if (!boxes.has(chart.title)) boxes.set(chart.title, newBox(chart.title));
    }
    const order = titles.map((title) => boxes.get(title));
    if (order.some((box, n) => sheet.children[n] !== box)) sheet.replaceChildren(...order);
    const ink = getComputedStyle(area).color;
    for (const chart of charts) {
      const box = boxes.get(chart.title);
      const end = looks ? "; arrow keys go along it, Enter looks at an iteration" : "; arrow keys go along it";
      box.setAttribute("aria-label", chart.summary + end);
      box.style.setProperty("--wb-bar-top", `${chartTop(chart) - CHART_ROW}px`);
      plotly.react(box, chart.curves.map((curve) => chartTrace(curve, ink, chartUnit(chart))), chartLayout(chart, ink), {
        responsive: true,
        displaylogo: false,
        displayModeBar: true, // the style sheet shows it where the pointer or the keyboard is
        modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d", "sendChartToCloud"],
      });
      if (!box.dataset.heard) {
        box.dataset.heard = "yes";
        box.on("plotly_click", (event) => {
          const point = event.points[0];
          look(current(chart.title).curves[point.curveNumber], point.x);
        });
      }
    }
  }

  function current(title) {
    return charts.find((chart) => chart.title === title);
  }

  function look(curve, x) {
    if (looks) send(looks, { x, source: curve.source });
  }

  function newBox(title) {
    const box = make("div", { class: "wb-chart", tabindex: "0", role: "group" });
    box.dataset.chart = title;
    let at = -1;
    box.addEventListener("keydown", (event) => {
      const { curves } = current(title);
      const number = curves.findIndex((curve) => curve.kind !== "faint" && !curve.source && curve.x.length);
      if (number < 0) return;
      const curve = curves[number];
      const last = curve.x.length - 1;
      if (at > last) at = last;
      const to = {
        ArrowRight: Math.min(at + 1, last), ArrowLeft: at < 0 ? last : Math.max(at - 1, 0), Home: 0, End: last,
      }[event.key];
      if (event.key === "Enter" && at >= 0) look(curve, curve.x[at]);
      else if (to === undefined) return;
      else {
        at = to;
        plotly.Fx.hover(box, [{ curveNumber: number, pointNumber: at }]);
        said.textContent = `${title} at ${shortNumber(curve.x[at])}: ${chartReadings(current(title), curve, at)}`;
      }
      event.preventDefault();
      event.stopPropagation();
    });
    box.addEventListener("blur", () => plotly.Fx.unhover(box));
    room.observe(box);
    return box;
  }

  // the page's theme, and the room that there is
  const theme = new MutationObserver(() => plotly && charts.length && plot());
  for (const root of [document.documentElement, document.body]) {
    theme.observe(root, { attributes: true, attributeFilter: ["class", "data-jp-theme-name"] });
  }
  const room = new ResizeObserver(() => {
    if (area.offsetWidth) for (const box of boxes.values()) if (box.data) plotly.Plots.resize(box);
  });

  function end() {
    over = true;
    theme.disconnect();
    room.disconnect();
    for (const box of boxes.values()) plotly.purge(box);
    boxes.clear();
  }

  return { draw, end };
}

// What the arrow keys have come to, in words: of areas all that are stacked there.
function chartReadings(chart, curve, at) {
  const unit = chart.unit === "bytes" ? " B" : chartUnit(chart);
  const among = curve.kind === "area" ? chart.curves.filter((one) => one.kind === "area" && one.y[at]) : [curve];
  return among.map((one) => `${one.name} ${one.y[at] === null ? "not finite" : shortNumber(one.y[at])}${unit}`).join(", ");
}

// The last points of a chart as a table: a row an x, a column a curve.
function chartTable(chart) {
  const curves = chart.curves.filter((curve) => curve.kind !== "faint");
  const rows = new Map();
  curves.forEach((curve, column) => curve.x.forEach((x, n) => {
    if (!rows.has(x)) rows.set(x, []);
    rows.get(x)[column] = curve.y[n] === null ? "not finite" : shortNumber(curve.y[n]);
  }));
  const xs = [...rows.keys()].sort((one, other) => one - other).slice(-CHART_ROWS);
  const head = [chart.x, ...curves.map((curve) => curve.name)].map((name) => make("th", { scope: "col" }, name));
  const lines = xs.map((x) => make(
    "tr", {}, make("th", { scope: "row" }, shortNumber(x)), ...curves.map((_, column) => make("td", {}, rows.get(x)[column] ?? "")),
  ));
  const unit = chart.unit === "bytes" ? ", bytes" : chart.y && `, ${chart.y}`;
  const cut = xs.length < rows.size ? `, the last ${xs.length} of ${rows.size}` : "";
  const table = make("table", { class: "wb-numbers" }, make("caption", {}, `${chart.title}${unit}${cut}`));
  table.append(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines));
  return table;
}

// The unit behind a number, where there is one.
function chartUnit(chart) {
  return ["", "no unit", "value", "count", "memory in use"].includes(chart.y) ? "" : ` ${chart.y}`;
}

function shortNumber(number) {
  return Number.isInteger(number) ? number.toLocaleString("en") : number.toPrecision(4);
}

// Whether a chart has the points before those that were added.
function goesOn(before, added) {
  return before?.title === added.title && added.curves.every((curve, n) => before.curves[n]?.x.length === curve.first);
}

// Html whose patterns are found in it, also where another panel of the page has the same, unseen.
function ownPatterns(html, number) {
  return html.replaceAll(/(id="|url\(#)wb-/g, `$1wb-${number}-`);
}

// A chart with the points that it had and those that were added.
function withPoints(before, added) {
  const curves = added.curves.map((curve, n) => {
    const had = before.curves[n];
    return { ...curve, x: had.x.concat(curve.x), y: had.y.concat(curve.y), words: had.words.concat(curve.words) };
  });
  return { ...added, curves };
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

function chartShade(colour, share) {
  const parts = colour.startsWith("#")
    ? [1, 3, 5].map((n) => parseInt(colour.slice(n, n + 2), 16))
    : (colour.match(/[\d.]+/g) || [128, 128, 128]).slice(0, 3);
  return `rgba(${parts.join(",")},${share})`;
}

// plotly reads text as html
function plainText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

function chartTrace(curve, ink, unit) {
  const colour = curve.colour === "currentColor" ? ink : curve.colour;
  const common = {
    type: "scatter", name: plainText(curve.name), x: curve.x, y: curve.y, text: curve.words.map(plainText), showlegend: false, connectgaps: false,
  };
  const hover = `%{x}: %{y:.4~g}${plainText(unit)}${curve.words.length ? "<br>%{text}" : ""}<extra>%{fullData.name}</extra>`;
  if (curve.kind === "area") {
    const plain = !curve.hatch;
    return {
      ...common, mode: curve.x.length > 2 ? "lines" : "lines+markers", stackgroup: "owners", line: { color: colour, width: 1 },
      fillcolor: chartShade(colour, plain ? 0.9 : 0.3), hovertemplate: "%{y:.4~s}B<extra>%{fullData.name}</extra>",
      fillpattern: plain ? undefined : { shape: curve.hatch, fgcolor: colour, fillmode: "overlay", size: 6, solidity: 0.3 },
    };
  }
  if (curve.kind === "points") {
    const marker = { color: colour, symbol: `${curve.marker}-open`, size: 7 };
    return { ...common, mode: "markers", marker, hovertemplate: hover };
  }
  const line = { color: colour, dash: CHART_DASHES[curve.dash] || "solid", width: curve.kind === "faint" ? 1 : 2 };
  if (curve.kind === "faint") return { ...common, mode: "lines", line, opacity: 0.4, hovertemplate: hover };
  const marker = { color: colour, symbol: curve.marker, size: 6 };
  return { ...common, mode: curve.x.length > 60 ? "lines" : "lines+markers", line, marker, hovertemplate: hover };
}

// The height of what stands over a plot.
function chartTop(chart) {
  return CHART_TITLE + (chart.note ? CHART_NOTE : 0) + CHART_ROW;
}

function chartLayout(chart, ink) {
  const axis = { gridcolor: chartShade(ink, 0.15), linecolor: chartShade(ink, 0.4), zerolinecolor: chartShade(ink, 0.3), automargin: true };
  const bytes = chart.unit === "bytes";
  const xs = chart.curves.flatMap((curve) => curve.x);
  const few = chart.x === "iteration" && xs.length < 1000 && Math.max(...xs) - Math.min(...xs) < 9; // whole numbers alone
  const across = { xref: "paper", x0: 0, x1: 1, yref: "y", type: "line", line: { color: ink, width: 1, dash: "dash" } };
  const along = { yref: "paper", y0: 0, y1: 1, xref: "x", type: "line", line: { color: ink, width: 1, dash: "dot" } };
  const shapes = [];
  if (chart.limit) shapes.push({ ...across, y0: chart.limit[0], y1: chart.limit[0] });
  if (chart.at !== null) shapes.push({ ...along, x0: chart.at, x1: chart.at });
  const small = { showarrow: false, xref: "paper", font: { size: 10, color: ink } };
  const annotations = [{ ...small, text: plainText(chart.note), x: 0, xanchor: "left", yref: "paper", y: 1, yanchor: "bottom", yshift: CHART_ROW }];
  if (chart.y) annotations.push({ ...small, text: plainText(chart.y), x: 0, xanchor: "left", yref: "paper", y: 1, yanchor: "bottom", yshift: 3 });
  if (chart.limit) annotations.push({ ...small, text: plainText(chart.limit[1]), x: 0, xanchor: "left", y: chart.limit[0], yanchor: "top" });
  return {
    title: { text: `<b>${plainText(chart.title)}</b>`, font: { size: 12 }, x: 0, xref: "paper", y: 1, yanchor: "top", pad: { t: 3 } },
    font: { color: ink, size: 11, family: "system-ui, sans-serif" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    margin: { l: 46, r: 10, t: chartTop(chart), b: 36 }, hovermode: bytes ? "x" : "closest", uirevision: chart.title,
    xaxis: {
      ...axis, title: { text: chart.x, standoff: 4 }, nticks: 8, ...(few ? { tick0: 0, dtick: 1 } : {}),
    },
    yaxis: {
      ...axis, type: chart.log ? "log" : "linear", ...(bytes ? { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" } : {}),
    },
    modebar: { orientation: "h", bgcolor: "rgba(0,0,0,0)", color: chartShade(ink, 0.4), activecolor: ink },
    shapes, annotations,
  };
}
