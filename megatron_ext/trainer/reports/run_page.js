// Charts of one run or several: over the steps, by layer, by rank, the worst microbatch, costs.

const LOAD = "busiest rank / mean";
const CURVES = [
  ["tokens_per_s", "Throughput", "tokens per second", " %"],
  ["imbalance_after", "Imbalance as computed", LOAD, ""],
  ["loss", "Loss", "mean over the step's tokens", ""],
];

function draw(data, main) {
  const runs = data.runs.map((run, number) => ({ ...run, number }));
  legend(main, runs.map((run) => run.name));
  overSteps(main, runs, data);
  const withLayers = runs.filter((run) => run.layers);
  if (withLayers.length) layers(main, withLayers);
  if (withLayers.some((run) => run.layers.worst.length)) worst(main, withLayers.filter((run) => run.layers.worst.length));
  const withCosts = runs.filter((run) => Object.keys(run.costs).length);
  if (withCosts.length) costs(main, withCosts);
}

const shown = (runs) => runs.filter((run) => !state.hidden.has(run.name));

function overSteps(main, runs, { warmup, bands }) {
  const base = plain(runs[0].name);
  const text = runs.length > 1 ? `Below each, what differs from run ${runs[0].name}: curves that look alike above may not be alike.` : "";
  const part = section(main, "Over the steps", text);
  const knowTokens = runs.every((run) => run.curves.tokens.some((value) => value != null));
  const across = knowTokens ? ["step", "tokens"] : ["step"];
  choice(part.appendChild(element("div", { class: "controls" })), "over", "Over", across.map((key) => [key, key === "step" ? "steps" : "tokens"]), redraw);
  const row = part.appendChild(element("div", { class: "row" }));
  for (const [key, title, unit, sign] of CURVES) {
    const isSpeed = key === "tokens_per_s";
    const note = isSpeed && bands ? `${unit} after the first ${warmup} steps: median of the steps around, and a band with half of them` : unit;
    chart(row, title, note, () => {
      const traces = shown(runs).flatMap((run) => curve(run.curves, key, run));
      const alone = runs.length === 1 && key === "imbalance_after";
      if (alone) {
        traces[0].name = "as computed";
        traces.unshift({ ...curve(runs[0].curves, "imbalance_before", runs[0])[0], name: "if experts stay at home", line: { color: css("--muted"), width: 2, dash: "dot" } });
      }
      const layout = { xaxis: { title: { text: state.over }, anchor: "y", whole: state.over === "step" }, yaxis: { domain: [0, 1] }, showlegend: alone };
      if (runs.length > 1) {
        const others = shown(runs).filter((run) => run.against);
        const along = runs[0].curves[state.over];
        traces.push({ x: along, y: along.map(() => 0), line: { ...line(0), width: 1 }, mode: "lines", hoverinfo: "skip", yaxis: "y2" });
        traces.push(...others.flatMap((run) => curve(run.against, key, run, "y2")));
        layout.yaxis.domain = [0.46, 1];
        layout.yaxis2 = { domain: [0, 0.34], ticksuffix: sign, zeroline: false, exponentformat: "power" };
        layout.xaxis.anchor = "y2";
        layout.annotations = [{ text: `minus ${base}`, xref: "paper", yref: "paper", x: 0, y: 0.35, xanchor: "left", yanchor: "bottom", showarrow: false, font: { color: css("--muted") } }];
      }
      return { traces, layout, height: runs.length > 1 ? 380 : 280 };
    });
  }
}

// Traces of a run's curve; behind it the band, if it has one.
function curve(curves, key, run, yaxis = "y") {
  const x = curves[state.over];
  const mode = x.length > 1 ? "lines" : "markers";
  const main = { x, y: curves[key], name: plain(run.name), mode, line: line(run.number), connectgaps: false, yaxis };
  if (!current.bands || !curves[`${key}_low`]) return [main];
  const edge = (end, more) => ({ x, y: curves[`${key}_${end}`], mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, yaxis, ...more });
  return [edge("low", {}), edge("high", { fill: "tonexty", fillcolor: `${line(run.number).color}2e` }), main];
}

function chosenRun(runs) {
  return runs.find((run) => run.name === state.layer_run) ?? runs[0];
}

function layers(main, runs) {
  const part = section(main, "Layers and ranks", "Which layer is unequal, when, and on which ranks. 1 is a rank's equal share.");
  const controls = part.appendChild(element("div", { class: "controls" }));
  if (!state.layer_run) state.layer_run = (runs.find((run) => run.number) ?? runs[0]).name;
  const names = { imbalance_after: "as computed", imbalance_after_max: "as computed, worst microbatch", imbalance_before: "if experts stay at home" };
  choice(controls, "layer_run", "Run", runs.map((run) => [run.name, run.name]), () => show(current));
  const known = Object.keys(names).filter((name) => name in chosenRun(runs).layers.columns);
  if (known.length) {
    choice(controls, "quantity", "Imbalance", known.map((name) => [name, names[name]]), redraw);
    choice(controls, "scale", "Colours", [["fixed", "from 1 to 2, on every page"], ["own", "from 1 to the most here"]], redraw);
    const each = chosenRun(runs).layers.steps_each;
    chart(part, "Imbalance by layer and step", `${LOAD}${each > 1 ? `, means of ${each} steps` : ""}`, () => {
      const of = chosenRun(runs).layers;
      const trace = heat(of.steps, of.layers, of.columns[state.quantity], 1, "step %{x:.0f}, layer %{y}: %{z:.3f}");
      if (state.scale === "own") Object.assign(trace, { zmax: greatest(trace.z), colorbar: COLORBAR });
      return { traces: [trace], layout: heatLayout(of.layers, "step"), height: tall(of.layers.length) };
    });
  }
  const steps = chosenRun(runs).layers.rank_steps;
  if (!steps.length) return;
  const ranks = part.appendChild(element("div", { class: "controls" }));
  slider(ranks, "rank_step", "Step of the ranks below", steps.length, (place) => `step ${steps[place]}`, redraw);
  const row = part.appendChild(element("div", { class: "row" }));
  for (const [key, title] of [["before", "Ranks if experts stay at home"], ["after", "Ranks as computed"]]) {
    chart(row, title, "load / mean of the layer's ranks, of a step", () => {
      const of = chosenRun(runs).layers;
      const loads = of.ranks[key][state.rank_step];
      const trace = heat(loads[0].map((_, rank) => rank), of.layers, loads, 0, "rank %{x}, layer %{y}: %{z:.2f}");
      return { traces: [trace], layout: heatLayout(of.layers, "rank"), height: tall(of.layers.length) };
    });
  }
}

const greatest = (nested) => nested.reduce((most, each) => (Array.isArray(each) ? Math.max(most, greatest(each)) : Math.max(most, each ?? 1)), 1);
const tall = (rows) => Math.max(190, Math.min(560, 90 + 26 * rows, 120 + 7 * rows + 200));

function heat(x, y, z, least, said) {
  return { type: "heatmap", x, y, z, ...fixedColours(least), hoverongaps: false, hovertemplate: `${said}<extra></extra>` };
}

function heatLayout(numbers, across) {
  const ticks = numbers.length <= 16 ? { tickvals: numbers } : { whole: true };
  return { hovermode: "closest", xaxis: { title: { text: across }, showgrid: false, whole: true }, yaxis: { title: { text: "layer" }, autorange: "reversed", showgrid: false, ...ticks } };
}

function worst(main, runs) {
  const part = section(main, "The worst microbatch", "Ranks' loads without balancing, replicas from their expert's home to where they compute, and the loads that come of it.");
  const controls = part.appendChild(element("div", { class: "controls" }));
  state.worst_run ??= (runs.find((run) => run.layers.worst.some((one) => one.replicas.length)) ?? runs[0]).name;
  choice(controls, "worst_run", "Run", runs.map((run) => [run.name, run.name]), () => show(current));
  const run = runs.find((one) => one.name === state.worst_run);
  const say = (one) => `step ${one.step}, layer ${one.layer}, microbatch ${one.microbatch}`;
  choice(controls, "worst_place", "Microbatch", run.layers.worst.map((one, place) => [place, say(one)]), () => show(current));
  const one = run.layers.worst[state.worst_place];
  const mean = one.before.reduce((sum, load) => sum + load, 0) / one.before.length;
  const over = (loads) => digits(Math.max(...loads) / (mean || 1));
  const note = `${say(one)}: ${over(one.before)} x the mean before, ${over(one.after)} x after, ${one.replicas.length} replica${one.replicas.length === 1 ? "" : "s"}`;
  chart(part, "Ranks before and after, and the replicas between", note, () => worstFigure(one, mean));
}

function worstFigure(one, mean) {
  const ranks = one.before.map((_, rank) => rank);
  const most = Math.max(...one.before, ...one.after);
  const bars = (loads, yaxis, name, color) => ({ type: "bar", x: ranks, y: loads, yaxis, name, marker: { color, line: { width: 0 } }, hovertemplate: `rank %{x}: %{y:,} assignments ${name}<extra></extra>` });
  const crowd = Math.max(0.35, Math.min(1, 24 / one.replicas.length));
  const color = COLORS[4];
  const arrows = one.replicas.map(([, home, rank]) => ({
    x: rank, y: 0.04, ax: home, ay: 0.96, xref: "x", yref: "y2", axref: "x", ayref: "y2", text: "",
    showarrow: true, arrowhead: 2, arrowsize: 0.9, arrowwidth: 1.4, arrowcolor: color, opacity: crowd,
  }));
  const ends = {
    type: "scatter", mode: "markers", yaxis: "y2", x: one.replicas.map(([, , rank]) => rank), y: one.replicas.map(() => 0.04),
    marker: { size: 9, opacity: 0 }, text: one.replicas.map(([expert, home, rank]) => `expert ${expert}: rank ${home} to rank ${rank}`), hovertemplate: "%{text}<extra></extra>",
  };
  const level = (yref) => ({ type: "line", xref: "paper", x0: 0, x1: 1, yref, y0: mean, y1: mean, line: { color: css("--ink"), width: 1.5, dash: "dot" } });
  const title = (text) => ({ title: { text }, rangemode: "tozero", range: [0, most * 1.08] });
  const layout = {
    hovermode: "closest", bargap: 0.25, annotations: arrows, shapes: [level("y"), level("y3")],
    xaxis: { title: { text: "rank; the dotted line is an equal share" }, anchor: "y3", showgrid: false, whole: true },
    yaxis: { domain: [0.66, 1], ...title("before") },
    yaxis2: { domain: [0.36, 0.64], range: [0, 1], visible: false, fixedrange: true },
    yaxis3: { domain: [0, 0.34], ...title("after") },
  };
  return { traces: [bars(one.before, "y", "before", css("--muted")), ends, bars(one.after, "y3", "after", COLORS[1])], layout, height: 520 };
}

function costs(main, runs) {
  const part = section(main, "What ranks wait for", "Means over the steps. Only what ranks wait for makes a step longer; what runs behind other work does not. The rest of a step is Megatron's; a profile shows its parts.");
  const row = part.appendChild(element("div", { class: "row" }));
  const waited = [["planning", "planning", COLORS[0]], ["weights_exposed", "weights of replicas", COLORS[1]], ["gradients_exposed", "gradients of replicas", COLORS[3]]];
  const behind = [["weights_hidden", "weights of replicas", COLORS[1]], ["gradients_hidden", "gradients of replicas", COLORS[3]]];
  for (const [title, parts] of [["Ranks wait", waited], ["Behind other work", behind]]) {
    chart(row, title, "percent of a step", () => {
      const of = shown(runs);
      const traces = parts.filter(([key]) => of.some((run) => key in run.costs)).map(([key, name, color]) => ({
        type: "bar", orientation: "h", name, x: of.map((run) => 100 * (run.costs[key] ?? 0)), y: of.map((run) => plain(run.name)),
        marker: { color }, hovertemplate: `${name}: %{x:.2f} %<extra></extra>`,
      }));
      const layout = { barmode: "stack", hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" }, xaxis: { ticksuffix: " %", rangemode: "tozero" }, yaxis: { type: "category", autorange: "reversed" }, bargap: 0.4 };
      return { traces, layout, height: 130 + 44 * of.length + (narrow() ? 60 : 0) };
    });
  }
}
