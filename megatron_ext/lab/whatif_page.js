// Charts of what balancing would bring: by layer, and by the slots that were tried.

const BEFORE = "experts at home";

function draw(data, main) {
  const after = `balanced, ${data.slots} slot${data.slots > 1 ? "s" : ""} a rank`;
  legend(main, [BEFORE, after]);
  const text = "Busiest rank / mean, over the microbatches: bars are means above 1, whiskers end at the worst.";
  // Of both charts, so that bars of both compare.
  const most = Math.max(...data.layers.flatMap((layer) => [layer.imbalance_before_worst, layer.imbalance_worst]));
  const row = section(main, "How even the ranks would be", text).appendChild(element("div", { class: "row" }));
  chart(row, "By layer", "layers of the model, from 1", () => {
    const traces = [
      [BEFORE, "imbalance_before", 0],
      [after, "imbalance", 1],
    ].map(([name, key, number]) => bars(data.layers, "layer", key, name, number));
    return { traces: shown(traces), layout: even("layer", most) };
  });
  chart(row, "By slots", "replicas that a rank can hold", () => {
    const without = { ...bars(data.tried.slice(0, 1), "slots", "imbalance_before", BEFORE, 0), x: [0] };
    const traces = [without, bars(data.tried, "slots", "imbalance", after, 1)];
    return { traces: shown(traces), layout: { ...even("slots a rank", most), barmode: "overlay" } };
  });
}

const shown = (traces) => traces.filter((trace) => !state.hidden.has(trace.name));

const even = (title, most) => ({ barmode: "group", xaxis: { type: "category", title: { text: title } }, yaxis: { range: [1, 1 + 1.05 * Math.max(most - 1, 0.01)] } });

function bars(rows, place, key, name, number) {
  const means = rows.map((row) => row[key]);
  const worst = rows.map((row, index) => row[`${key}_worst`] - means[index]);
  const whiskers = { type: "data", symmetric: false, array: worst, arrayminus: worst.map(() => 0), color: css("--ink") };
  return { type: "bar", x: rows.map((row) => row[place] || "all"), base: 1, y: means.map((mean) => mean - 1), customdata: means, hovertemplate: `${name}: %{customdata:.3f}<extra></extra>`, error_y: whiskers, name, marker: { color: COLORS[number] } };
}
