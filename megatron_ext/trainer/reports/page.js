// What all pages share: colours, charts and controls.
// A page's own script defines `draw(data, main)`. Names come from strangers: into the document they
// only go as text, and into Plotly, which reads a little HTML, through `plain`.
"use strict";

// Okabe and Ito's colours, which people with any colour vision tell apart, but those too light or dark.
const COLORS = ["#e69f00", "#0090d0", "#009e73", "#cc79a7", "#d55e00", "#7a7fd1"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const SCALE = "Cividis";
const COLORBAR = { thickness: 10, outlinewidth: 0 };
const preferences = ["(prefers-color-scheme: dark)", "(max-width: 40rem)"].map((query) => matchMedia(query));
const state = { hidden: new Set() }; // What the reader chose: it stays when the page is drawn again.
let charts = [];
let current; // What is drawn.

const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const narrow = () => preferences[1].matches;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const digits = (value, number = 3) => (value == null ? "unknown" : Number(value.toPrecision(number)).toLocaleString("en"));

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function section(main, title, text) {
  return main.appendChild(element("section", {}, element("h2", {}, title), element("p", {}, text)));
}

// A chart in a frame; `make` returns Plotly's traces and layout, and is called again for every change.
function chart(parent, title, note, make) {
  const host = element("div");
  const caption = element("figcaption", {}, title, element("small", {}, note));
  parent.append(element("figure", { "aria-label": title }, caption, host));
  const one = { host, draw: () => plot(host, make()) };
  charts.push(one);
  return one;
}

function axis(more = {}) {
  return { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), exponentformat: "SI", automargin: true, ...more };
}

function plot(host, { traces, layout = {}, height = 300 }) {
  const axes = Object.fromEntries(
    Object.entries({ xaxis: {}, yaxis: {}, ...layout }).filter(([name]) => /^[xy]axis/.test(name)),
  );
  for (const name of Object.keys(axes)) axes[name] = axis(axes[name]);
  const theme = {
    height, autosize: true, margin: { l: 55, r: 15, t: 10, b: 40 }, showlegend: false, hovermode: "x unified",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    font: { color: css("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: -1 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
  };
  const isNew = !host.data;
  Plotly.react(host, traces, { ...theme, ...layout, ...axes }, { displayModeBar: false, responsive: true }).then(() => {
    if (isNew) host.on("plotly_relayout", () => wholeTicks(host));
    wholeTicks(host);
  });
}

// Ticks of axes marked as `whole`, such as ranks and steps. Plotly's own have halves where few
// numbers are in sight: there each number has a tick.
function wholeTicks(host) {
  const changes = {};
  for (const [name, { whole, range, tickmode }] of Object.entries(host.layout).filter(([name]) => /^[xy]axis/.test(name))) {
    if (!whole || !range) continue; // While the window changes its size, Plotly knows no range.
    const few = Math.abs(range[1] - range[0]) < 10;
    if (few && tickmode !== "linear") Object.assign(changes, { [`${name}.tickmode`]: "linear", [`${name}.tick0`]: 0, [`${name}.dtick`]: 1 });
    if (!few && tickmode === "linear") changes[`${name}.tickmode`] = "auto";
  }
  if (Object.keys(changes).length) Plotly.relayout(host, changes);
}

// Colours that mean the same on every page: from `least` to twice the mean.
function fixedColours(least) {
  const ticks = [0, 1, 2, 3].map((place) => least + (place * (2 - least)) / 4);
  return { zmin: least, zmax: 2, colorscale: SCALE, colorbar: { ...COLORBAR, tickvals: [...ticks, 2], ticktext: [...ticks, "≥ 2"] } };
}

const redraw = () => charts.forEach((one) => one.draw());

// Draws one chart after the other: what is on top can be read, and used, before the last is there.
function drawEach(of) {
  const [first, ...others] = of;
  if (!first) document.body.dataset.drawn = charts.length;
  if (!charts.includes(first)) return; // The page was built anew since.
  first.draw();
  setTimeout(drawEach, 0, others);
}

// How a run or strategy looks in all charts: `number` counts from 0, in the order of the page.
function line(number, more = {}) {
  return { color: COLORS[number % COLORS.length], width: 2, dash: DASHES[Math.floor(number / COLORS.length) % DASHES.length], ...more };
}

function swatch(number) {
  const dashes = { solid: "", dash: "6 4", dot: "2 3", dashdot: "6 3 2 3" };
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const look = line(number);
  for (const [name, value] of Object.entries({ width: 26, height: 10, "aria-hidden": "true" })) svg.setAttribute(name, value);
  const drawn = { x1: 1, x2: 25, y1: 5, y2: 5, stroke: look.color, "stroke-width": 4, "stroke-dasharray": dashes[look.dash] };
  for (const [name, value] of Object.entries(drawn)) stroke.setAttribute(name, value);
  svg.append(stroke);
  return svg;
}

// The legend of all charts: a button for each name, which hides it everywhere.
function legend(main, names) {
  const nav = element("nav", { "aria-label": "Shown in the charts" });
  names.forEach((name, number) => {
    const toggle = () => {
      state.hidden.has(name) ? state.hidden.delete(name) : state.hidden.add(name);
      button.setAttribute("aria-pressed", !state.hidden.has(name));
      redraw();
    };
    const button = element("button", { id: `show-${number}`, type: "button", onclick: toggle, "aria-pressed": !state.hidden.has(name) }, swatch(number), name);
    nav.append(button);
  });
  if (names.length > 1) main.append(nav);
}

// A choice among `[value, text]`; what was chosen stays in `state` under `key`.
function choice(parent, key, label, options, change) {
  if (!options.some(([value]) => value === state[key])) state[key] = options[0][0];
  const select = element("select", { id: key, onchange: () => { state[key] = options[select.selectedIndex][0]; change(); } });
  for (const [value, text] of options) {
    const option = element("option", {}, text);
    option.selected = value === state[key];
    select.append(option);
  }
  const shown = element("label", {}, label, select);
  if (options.length > 1) parent.append(shown);
}

// A slider over places 0 to count - 1; arrow keys move it.
function slider(parent, key, label, count, say, change) {
  state[key] = Math.min(state[key] ?? count - 1, count - 1);
  const output = element("output", { for: key });
  const input = element("input", { id: key, type: "range", min: 0, max: count - 1, step: 1 });
  input.value = state[key];
  const told = () => { output.textContent = say(state[key]); input.setAttribute("aria-valuetext", say(state[key])); };
  input.addEventListener("input", () => { state[key] = Number(input.value); told(); change(); });
  told();
  parent.append(element("label", { class: "slider" }, label, input, output));
}

function show(data) {
  current = data;
  const focused = document.activeElement?.id;
  const top = scrollY;
  charts.forEach((one) => Plotly.purge(one.host));
  charts = [];
  delete document.body.dataset.drawn;
  const main = document.querySelector("main");
  main.replaceChildren();
  draw(data, main);
  drawEach(charts);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  scrollTo(0, top);
}

// On narrow screens a row of a wide table is a list, in which each cell names its column.
function nameCells(table) {
  const [head, ...rows] = table.rows;
  table.classList.toggle("many", head.cells.length > 3);
  for (const row of rows) [...row.cells].forEach((cell, place) => { cell.dataset.column = head.cells[place].textContent; });
}

addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table").forEach(nameCells);
  show(JSON.parse(document.getElementById("data").textContent));
  preferences.forEach((preference) => preference.addEventListener("change", redraw));
});
