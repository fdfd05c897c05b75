// Creates the chart, the strip, the panel and the table, and connects their events.

const section = document.getElementById("values");
const byId = (id) => document.getElementById(id);
let chart = null;
const table = makeTable(section, () => (chart ? chart.step() : data.peak));

if (nSteps > 0) {
  byId("reserved").hidden = !data.chart.live[RESERVED].some((n) => n > 0);
  byId("again").hidden = starts[data.sameHeight[1]] - starts[data.sameHeight[0]] <= 0.05 * starts[nSteps];
  byId("blocks").hidden = !strings.some((text) => /^iterations? .*–/.test(text));
  byId("parts").hidden = segments.length === 0;
  byId("phases").append(...phases.flatMap((phase, i) => (data.steps.phase.includes(i)
    ? [el("span", { class: `p-${phase}` }, el("i", { class: "swatch" }), phase)] : [])));
  // Results below 1 % of the peak are too small to be visible.
  const most = data.chart.at.reduce((max, _, i) => Math.max(max, data.chart.live.reduce((sum, ofKind) => sum + ofKind[i], 0)), 0);
  byId("outputs").hidden = data.chart.live[kinds.indexOf("output")][0] <= most / 100;
  const panel = makePanel(byId("panel"), listLive);
  const strip = makeStrip(byId("strip"));
  const show = (step) => { panel.show(step); strip.show(step); };
  chart = makeChart(byId("chart"), show, (bounds) => {
    strip.draw(bounds);
    if (chart) strip.show(chart.step());
    byId("unzoom").disabled = bounds.whole;
  });
  chart.select(data.peak);
  byId("to-peak").addEventListener("click", () => chart.select(data.peak));
  byId("unzoom").addEventListener("click", chart.whole);
  const byTime = (yes) => {
    byId("by-time").setAttribute("aria-pressed", String(yes));
    byId("by-step").setAttribute("aria-pressed", String(!yes));
    chart.setByTime(yes);
  };
  byId("by-time").addEventListener("click", () => byTime(true));
  byId("by-step").addEventListener("click", () => byTime(false));
  if (!timed) { byTime(false); byId("by-time").disabled = true; }
  byId("chart").addEventListener("keydown", (event) => { if (event.key === "Enter") listLive(); });
  const withArguments = byId("arguments");
  withArguments.hidden = !groups.kind.includes(kinds.indexOf("argument"));
  withArguments.addEventListener("click", () => {
    const yes = withArguments.getAttribute("aria-pressed") !== "true";
    withArguments.setAttribute("aria-pressed", String(yes));
    chart.setArguments(yes);
  });
  new ResizeObserver(() => chart.resize()).observe(byId("chart"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", chart.redraw);
} else {
  byId("memory").hidden = true;
}

function listLive() {
  table.listAt(chart.step());
  section.scrollIntoView();
  section.focus({ preventScroll: true });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.target.matches("input, select")) table.listAt(null);
});
