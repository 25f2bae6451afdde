// Charts of a replay: strategies side by side.

function draw(data, main) {
  const all = data.strategies.map((one, number) => ({ ...one, number }));
  const shown = () => all.filter((one) => !state.hidden.has(one.name));
  legend(main, all.map((one) => one.name));

  const even = section(main, "How even ranks become", "Busiest rank / mean of each load: 1 is even.");
  chart(even, "Imbalance that is left", "bar: mean; diamond: 95 of 100 loads are below; cross: worst; dotted: without balancing", () => {
    const of = shown();
    const names = of.map((one) => plain(one.name));
    const dots = (key, name, symbol) => ({ type: "scatter", mode: "markers", name, x: names, y: of.map((one) => one[key]), marker: { symbol, size: 10, color: css("--ink") }, hovertemplate: `${name}: %{y:.3f}<extra></extra>` });
    const bars = { type: "bar", name: "mean", x: names, base: 1, y: of.map((one) => one.imbalance_mean - 1), marker: { color: of.map((one) => line(one.number).color) }, customdata: of.map((one) => one.imbalance_mean), hovertemplate: "mean: %{customdata:.3f}<extra></extra>" };
    const level = { type: "line", xref: "paper", x0: 0, x1: 1, y0: data.before, y1: data.before, line: { color: css("--ink"), width: 1.5, dash: "dot" } };
    const layout = { hovermode: "closest", shapes: [level], bargap: 0.5, xaxis: { type: "category" }, yaxis: { title: { text: "busiest rank / mean" } } };
    return { traces: [bars, dots("imbalance_p95", "95 of 100 loads", "diamond"), dots("imbalance_worst", "worst", "x")], layout, height: 340 };
  });
  const layers = Object.keys(all[0].layers);
  if (layers.length > 1) {
    chart(even, "Imbalance by layer", "mean of the layer's loads", () => {
      const of = shown();
      const cells = of.map((one) => layers.map((layer) => one.layers[layer]));
      const trace = { type: "heatmap", x: layers.map((layer) => `layer ${layer}`), y: of.map((one) => plain(one.name)), z: cells, ...fixedColours(1), hovertemplate: "%{y}, %{x}: %{z:.3f}<extra></extra>" };
      return { traces: [trace], layout: { hovermode: "closest", xaxis: { type: "category", showgrid: false }, yaxis: { type: "category", autorange: "reversed", showgrid: false } }, height: 110 + 34 * of.length };
    });
  }

  const price = section(main, "What that takes", "Means of a load, if nothing else is said.");
  const row = price.appendChild(element("div", { class: "row" }));
  const compared = [
    ["replicas_mean", "Replicas", "whose weights move before the experts compute", "", 1],
    ["max_rank_sends", "Busiest sender", "most replicas that one rank sends for a load", "", 1],
    ["remote_assignments_mean", "Tokens on other ranks", "assignments that are not computed where their token is", "", 1],
    ["solve_us_p50", "Planning", "median on this machine", " us", 1],
    ["moved_bytes", "Weights that move", "of a forward", " MiB", 2 ** 20],
    ["slot_bytes", "Memory for replicas", "weights in a rank's slots", " MiB", 2 ** 20],
  ];
  for (const [key, title, note, unit, scale] of compared.filter(([key]) => all.some((one) => one[key] > 0))) {
    chart(row, title, note, () => {
      const of = shown().slice().reverse();
      const values = of.map((one) => one[key] / scale);
      const bars = { type: "bar", orientation: "h", y: of.map((one) => plain(one.name)), x: values, text: values.map((value) => digits(value) + unit), textposition: "auto", marker: { color: of.map((one) => line(one.number).color) }, hoverinfo: "skip" };
      return { traces: [bars], layout: { bargap: 0.4, yaxis: { type: "category" }, xaxis: { rangemode: "tozero" } }, height: 100 + 36 * of.length };
    });
  }
}
