// The strip below the chart, aligned with it: the phases of the step, and the segments of the program, each
// where its forward pass runs and where it is recomputed.

function makeStrip(root) {
  const ROW = 16;
  const about = el("p", { class: "about" });
  const svg = el("svg:svg", { role: "img", "aria-label": "Phases of the step and segments of the plan" });
  root.append(svg, about);
  const levels = Math.max(-1, ...segments.map((segment) => segment.level)) + 1;
  const height = 4 + ROW * (1 + levels) + 2 * levels;
  svg.setAttribute("height", height);

  // Runs of consecutive operations with one phase and one segment.
  const runs = [];
  for (let i = 0; i < nSteps; i++) {
    const last = runs[runs.length - 1];
    const phase = data.steps.phase[i];
    const segment = data.steps.segment[i];
    if (last && last.phase === phase && last.segment === segment) last.after = i + 1;
    else runs.push({ phase, segment, first: i, after: i + 1 });
  }
  const byNumber = new Map(segments.map((segment) => [segment.number, segment]));
  const again = phases.indexOf("recompute");
  const phaseStretches = [];
  for (const run of runs) {
    const last = phaseStretches[phaseStretches.length - 1];
    const phase = phases[run.phase];
    if (last && last.title === phase) last.after = run.after;
    else phaseStretches.push({ first: run.first, after: run.after, fill: `var(--${phase})`, title: phase, text: phase });
  }
  // Segments in the forward pass and in recomputation, in program order; neighbours differ in shade.
  const shade = new Map(segments.map((segment, i) => [segment.number, i % 2 ? "odd" : ""]));
  const segmentStretches = [
    ...segments.map((segment) => ({
      first: segment.first, after: segment.last + 1, segment, text: strings[segment.label],
      title: `${strings[segment.label]}: forward`, className: `seg ${shade.get(segment.number)}`,
    })),
    ...runs.filter((run) => run.phase === again && byNumber.has(run.segment)).map((run) => {
      const segment = byNumber.get(run.segment);
      return {
        first: run.first, after: run.after, segment, text: strings[segment.label],
        title: `${strings[segment.label]}: recomputed`, className: `again ${shade.get(segment.number)}`,
      };
    }),
  ].sort((a, b) => a.first - b.first);
  let drawn = new Map(); // segment number -> its rectangles
  let line = null;
  let texts = [];
  let bounds = null;

  const stepsOf = ({ first, last }) => (first === last ? `operation ${first + 1}` : `operations ${first + 1}–${last + 1}`);
  const say = (segment) => {
    about.replaceChildren(...(segment
      ? [user(segment.label), `: forward in ${stepsOf(segment)}, saves ${formatBytes(segment.saved)}, recomputes ${formatFlops(segment.flops)}`]
      : []));
  };

  const place = (step) => bounds.left + (bounds.edge(step) - bounds.low) / (bounds.high - bounds.low) * bounds.width;

  // Draws intervals { first, after, className, fill, title, text, segment } in one row. Those that are too
  // narrow to be visible are merged with their neighbours and have the colour of the longest among them.
  function drawRow(row, stretches) {
    const SEEN = 1.5;
    const right = bounds.left + bounds.width;
    let joined = null;
    const sort = (stretch) => (stretch.segment ? stretch.className.split(" ")[0] : "");
    const flush = () => {
      if (!joined) return;
      if (joined.n === 1) rect(row, joined.from, joined.to, joined.longest);
      else {
        const { first, last, n, longest } = joined;
        const text = longest.fill ? longest.text : `${first.text} … ${last.text}`;
        rect(row, joined.from, joined.to, { ...longest, segment: null, text, title: `${first.title} … ${last.title} (${n} intervals)` });
      }
      joined = null;
    };
    for (const stretch of stretches) {
      const from = Math.max(place(stretch.first), bounds.left);
      const to = Math.min(place(stretch.after), right);
      if (to <= from) continue;
      const narrow = to - from < SEEN;
      if (joined && (!narrow || from - joined.to > SEEN || sort(joined.longest) !== sort(stretch))) flush();
      if (!narrow) { rect(row, from, to, stretch); continue; }
      if (!joined) joined = { from, to, n: 0, first: stretch, longest: stretch, lengths: new Map() };
      joined.to = Math.max(joined.to, to);
      joined.n += 1;
      joined.last = stretch;
      const key = stretch.fill || "";
      joined.lengths.set(key, (joined.lengths.get(key) || 0) + to - from);
      if (joined.lengths.get(key) >= joined.lengths.get(joined.longest.fill || "")) joined.longest = stretch;
    }
    flush();
  }

  function rect(row, from, to, { className, fill, title, text, segment }) {
    const y = 4 + row * (ROW + 2);
    const shape = el("svg:rect", {
      class: className, x: from, width: Math.max(to - from - 0.5, 0.5), y, height: ROW, rx: to - from > 6 ? 2 : 0, style: fill ? { fill } : {},
    }, el("svg:title", {}, title));
    svg.append(shape);
    if (to - from >= 7.2 * text.length + 8) {
      texts.push(el("svg:text", { x: from + 6, y: y + 12, class: fill ? "on-phase" : "" }, text));
    }
    if (segment) {
      shape.addEventListener("pointerenter", () => { mark(segment.number); say(segment); });
      if (!drawn.has(segment.number)) drawn.set(segment.number, []);
      drawn.get(segment.number).push(shape);
    }
  }

  function rowName(row, text) {
    if (bounds.left > 60) svg.append(el("svg:text", { class: "name", x: bounds.left - 8, y: 4 + row * (ROW + 2) + 12, "text-anchor": "end" }, text));
  }

  function draw(next) {
    bounds = next;
    svg.replaceChildren();
    drawn = new Map();
    texts = [];
    rowName(0, "phase");
    drawRow(0, phaseStretches);
    if (levels) rowName(1, "segments");
    for (let level = 0; level < levels; level++) drawRow(1 + level, segmentStretches.filter((s) => s.segment.level === level));
    line = el("svg:line", { class: "at", y1: 0, y2: height, x1: -9, x2: -9 });
    svg.append(line, ...texts); // texts stay legible where the line crosses them
  }

  function mark(number) {
    svg.querySelectorAll(".on").forEach((shape) => shape.classList.remove("on"));
    (drawn.get(number) || []).forEach((shape) => shape.classList.add("on"));
  }

  function show(step) {
    if (!bounds) return;
    const x = place(step);
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
    const segment = byNumber.get(data.steps.segment[step]);
    mark(segment ? segment.number : -1);
    say(segment);
  }

  return { draw, show };
}
