// Draws the live bytes over the step with uPlot, stacked by kind.
//
// The series of a kind is the sum of its bytes and those of all kinds below it. The highest sum is drawn
// first, and each lower one covers the part of it that belongs to other kinds. A point is an operation, whose
// bytes are live from its start to the start of the next point.

function makeChart(root, onShow, onScale) {
  const at = data.chart.at;
  const shown = kinds.map((_, k) => k).filter((k) => data.chart.live[k].some((n) => n > 0));
  let withArguments = true;
  let sums = [];
  let top = [];
  let highest = 0;

  function stack() {
    const left = shown.map((k) => withArguments || kinds[k] !== "argument");
    sums = [];
    shown.forEach((k, i) => {
      sums.push(data.chart.live[k].map((n, p) => (left[i] ? n : 0) + (i ? sums[i - 1][p] : 0)));
    });
    top = sums[sums.length - 1] || at.map(() => 0);
    highest = top.reduce((a, b) => Math.max(a, b), (withArguments && data.compiledPeak) || 0);
  }
  stack();
  const totals = at.map((_, p) => kinds.reduce((sum, _, k) => sum + data.chart.live[k][p], 0));
  let byTime = timed;
  let selected = data.peak; // the operation that the panel shows while the pointer is outside of the chart
  let hovered = null;

  const edge = (step) => (byTime ? starts[step] : step);
  const edges = () => [...at.map(edge), edge(nSteps)];
  const columns = () => [edges(), ...[...sums].reverse().map((sum) => [...sum, sum[sum.length - 1]])];

  // The point whose interval contains x.
  function pointAt(x) {
    let low = 0;
    let high = at.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (edge(at[middle]) <= x) low = middle; else high = middle - 1;
    }
    return low;
  }
  const pointOf = (step) => Math.max(0, at.findIndex((s, i) => s <= step && (i + 1 === at.length || at[i + 1] > step)));

  // Up to two decimals, since ticks can be at quarters of a unit: 1.25 GiB.
  const axisBytes = (n) => {
    const [left, unit] = scaled(n, byteUnits, 1024);
    return `${Number(left.toFixed(2))} ${unit}`;
  };
  const powers = Array.from({ length: 50 }, (_, i) => 2 ** i);
  const axis = (extra) => ({
    stroke: () => color("muted"),
    font: "12px system-ui, sans-serif",
    grid: { stroke: () => color("grid"), width: 1 },
    ticks: { show: false },
    ...extra,
  });
  const chart = new uPlot({
    width: root.clientWidth,
    height: root.clientHeight,
    padding: [18, 26, 0, 0],
    legend: { show: false },
    scales: {
      x: { time: false, range: (u, low, high) => [low, high] },
      y: { range: () => [0, highest * 1.06 || 1] },
    },
    axes: [
      axis({ size: 30, space: 90, values: (u, splits) => splits.map((x) => (byTime ? formatSeconds(x) : String(x))) }),
      axis({ size: 68, incrs: powers, values: (u, splits) => splits.map(axisBytes) }),
    ],
    series: [{}, ...[...shown].reverse().map((k) => ({
      stroke: () => color(kinds[k]),
      fill: () => color(kinds[k]),
      width: 0,
      paths: uPlot.paths.stepped({ align: 1 }),
      points: { show: false },
    }))],
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: 6 } },
    hooks: {
      draw: [drawMarks],
      setCursor: [(u) => {
        const left = u.cursor.left;
        hovered = left >= 0 ? pointAt(u.posToVal(left, "x")) : null;
        show();
      }],
      setScale: [(u, key) => { if (key === "x") onScale(bounds(u)); }],
      setSize: [(u) => onScale(bounds(u))],
    },
  }, columns(), root);

  function bounds(u) {
    const ratio = u.pxRatio || devicePixelRatio;
    const first = edge(0);
    const last = edge(nSteps);
    const low = u.scales.x.min ?? first;
    const high = u.scales.x.max ?? last;
    return { left: u.bbox.left / ratio, width: u.bbox.width / ratio, low, high, edge, whole: low <= first && high >= last };
  }

  function drawMarks(u) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
    ctx.clip();
    ctx.font = `${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.lineWidth = ratio;
    // The peak that the compiler reports, as a horizontal line.
    if (data.compiledPeak && withArguments) {
      const y = Math.round(u.valToPos(data.compiledPeak, "y", true)) + 0.5;
      ctx.strokeStyle = color("muted");
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.setLineDash([]);
      // Write the label at the end of the line that is farther from the dot of the peak.
      const dot = data.peak === null ? bbox.left + bbox.width : u.valToPos(edge(at[pointOf(data.peak)]), "x", true);
      const isLeft = dot - bbox.left > bbox.width / 2;
      const text = `compiled ${formatBytes(data.compiledPeak)}`;
      const width = ctx.measureText(text).width + 8 * ratio;
      const x = isLeft ? bbox.left + 4 * ratio : bbox.left + bbox.width - width - 4 * ratio;
      ctx.fillStyle = color("bg");
      ctx.fillRect(x, y - 18 * ratio, width, 15 * ratio);
      ctx.fillStyle = color("text");
      ctx.fillText(text, x + 4 * ratio, y - 7 * ratio);
    }
    // The peak, and the selected operation.
    const mark = (step, fill, radius) => {
      const p = pointOf(step);
      const x = u.valToPos(edge(at[p]), "x", true);
      const y = u.valToPos(top[p], "y", true);
      ctx.beginPath();
      ctx.arc(x, y, radius * ratio, 0, 7);
      ctx.fillStyle = fill;
      ctx.fill();
      ctx.strokeStyle = color("bg");
      ctx.lineWidth = 1.5 * ratio;
      ctx.stroke();
      return x;
    };
    if (selected !== null && selected !== data.peak) {
      const x = mark(selected, color("accent"), 4);
      ctx.strokeStyle = color("accent");
      ctx.lineWidth = ratio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    if (data.peak !== null) {
      // A bracket from the first to the last operation that reaches the same height.
      const y = u.valToPos(top[pointOf(data.peak)], "y", true);
      const [from, to] = data.sameHeight.map((step) => u.valToPos(edge(at[pointOf(step)]), "x", true));
      if (to - from > 12 * ratio) {
        ctx.strokeStyle = color("text");
        ctx.lineWidth = 1.5 * ratio;
        ctx.beginPath();
        ctx.moveTo(from, y);
        ctx.lineTo(to, y);
        for (const end of [from, to]) {
          ctx.moveTo(end, y - 4 * ratio);
          ctx.lineTo(end, y + 4 * ratio);
        }
        ctx.stroke();
      }
      mark(data.peak, color("text"), 4);
    }
    ctx.restore();
  }

  const step = () => (hovered === null ? selected : at[hovered]);

  function show() {
    const now = step();
    onShow(now);
    const p = pointOf(now);
    root.setAttribute("aria-valuenow", now + 1);
    root.setAttribute("aria-valuetext",
      `operation ${now + 1} of ${nSteps}, ${strings[data.steps.label[now]]}, ` +
      `${phases[data.steps.phase[now]]}: ${formatBytes(totals[p])} live`);
  }

  function select(next) {
    selected = next;
    hovered = null;
    const { min, max } = chart.scales.x;
    const x = edge(next);
    if (x < min || x > max) {
      const half = (max - min) / 2;
      const from = Math.min(Math.max(edge(0), x - half), edge(nSteps) - 2 * half);
      chart.setScale("x", { min: from, max: from + 2 * half });
    }
    chart.redraw(false, false);
    show();
  }

  function zoom(factor) {
    const x = edge(step());
    const { min, max } = chart.scales.x;
    const width = Math.min((max - min) * factor, edge(nSteps) - edge(0));
    const from = Math.min(Math.max(edge(0), x - width / 2), edge(nSteps) - width);
    chart.setScale("x", { min: from, max: from + width });
  }

  function whole() {
    chart.setScale("x", { min: edge(0), max: edge(nSteps) });
  }

  function setArguments(yes) {
    withArguments = yes;
    stack();
    chart.setData(columns(), false);
    chart.setScale("x", { min: chart.scales.x.min, max: chart.scales.x.max });
  }

  function setByTime(yes) {
    byTime = yes;
    chart.setData(columns());
    whole();
  }

  const move = (by) => select(at[Math.min(Math.max(0, pointOf(step()) + by), at.length - 1)]);
  const keys = {
    ArrowLeft: () => move(-1), ArrowDown: () => move(-1), ArrowRight: () => move(1), ArrowUp: () => move(1),
    PageDown: () => move(-10), PageUp: () => move(10), Home: () => select(at[0]),
    End: () => select(at[at.length - 1]), p: () => select(data.peak), P: () => select(data.peak),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": whole,
  };
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  chart.over.addEventListener("click", () => { if (hovered !== null) select(at[hovered]); });
  // On touch screens, a drag selects an operation instead of zooming.
  chart.over.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "touch") return;
    select(at[pointAt(chart.posToVal(event.clientX - chart.over.getBoundingClientRect().left, "x"))]);
  });
  root.setAttribute("aria-valuemin", 1);
  root.setAttribute("aria-valuemax", nSteps);
  const resize = () => chart.setSize({ width: root.clientWidth, height: root.clientHeight });
  return { select, whole, setByTime, setArguments, step, redraw: () => chart.redraw(false, true), resize };
}
