// The panel beside the chart: the operation under the pointer, the live bytes by kind, and the largest values.

function makePanel(root, onList) {
  const LARGEST = 5;
  const present = kinds.map((_, k) => k).filter((k) => data.chart.live[k].some((n) => n > 0));
  const cells = new Map();
  const list = el("dl", {}, ...present.map((k) => {
    const cell = el("dd");
    const row = el("div", { class: `k-${kinds[k]}` }, el("dt", {}, el("i", { class: "swatch" }), kinds[k]), cell);
    cells.set(k, [row, cell]);
    return row;
  }));
  const number = el("span");
  const badge = el("span");
  const loop = el("div", { class: "loop" });
  const op = el("div", { class: "op" });
  const where = el("div", { class: "where" });
  const live = el("p", { class: "live" });
  const largest = el("ol");
  const title = el("h3");
  const button = el("button", { type: "button", onclick: () => onList() }, "List what is live here");
  root.append(el("div", { class: "when" }, number, badge), loop, op, where, live, list, title, largest, button);

  // Returns the groups with most live bytes:
  // [group, number of arrays, bytes, first operation, last operation, one of the values, kind].
  function largestAt(step) {
    const found = new Map();
    for (let i = 0; i < lives.value.length; i++) {
      if (lives.born[i] > step || step > lives.dies[i]) continue;
      const value = lives.value[i];
      const g = values.group[value];
      const key = kinds.length * g + lives.kind[i];
      let entry = found.get(key);
      if (!entry) found.set(key, entry = [g, 0, 0, Infinity, 0, value, lives.kind[i]]);
      entry[1] += values.count[value];
      entry[2] += values.bytes[value];
      entry[3] = Math.min(entry[3], lives.born[i]);
      entry[4] = Math.max(entry[4], lives.dies[i]);
    }
    return [...found.values()].sort((a, b) => b[2] - a[2]).slice(0, LARGEST);
  }

  // Returns the user's line that all of these groups of library code are called from; "" if they have none.
  function commonCaller(entries) {
    const callers = new Set(entries.map(([g]) => strings[groups.source[g]].split(", from ")[1]).filter(Boolean));
    return callers.size === 1 ? [...callers][0] : "";
  }

  function show(step) {
    number.textContent = `Operation ${(step + 1).toLocaleString("en")} of ${nSteps.toLocaleString("en")}`;
    const phase = phases[data.steps.phase[step]];
    badge.className = `badge p-${phase}`;
    badge.textContent = phase;
    loop.replaceChildren(user(data.steps.iteration[step]));
    loop.hidden = !strings[data.steps.iteration[step]];
    op.replaceChildren(clipped(strings[data.steps.label[step]]));
    where.replaceChildren(user(data.steps.source[step]));
    const bytes = liveByKind(step);
    live.replaceChildren(formatBytes(bytes.reduce((a, b) => a + b, 0)), " ",
      el("small", {}, `live${timed ? ` at ${formatSeconds(starts[step])}` : ""}${step === data.peak ? ", the peak" : ""}`));
    for (const [k, [row, cell]] of cells) {
      cell.textContent = formatBytes(bytes[k]);
      row.classList.toggle("none", bytes[k] === 0);
    }
    const entries = largestAt(step);
    const caller = commonCaller(entries);
    title.replaceChildren("Largest here", ...(caller ? [", library code called from ", el("bdi", {}, caller)] : []));
    largest.replaceChildren(...entries.map(([g, n, total, born, dies, value, kind]) => {
      const what = strings[n > 1 ? groups.pattern[g] : values.what[value]];
      const full = strings[groups.source[g]];
      const source = caller ? full.replace(`, from ${caller}`, "") : full;
      return el("li", { class: `k-${kinds[kind]}` },
        el("div", { class: "first" }, el("b", {}, formatBytes(total)), n > 1 ? el("span", {}, `${n.toLocaleString("en")} ×`) : undefined, clipped(what)),
        el("div", { class: "second" }, kind === RESERVED ? "reserved for a loop · " : "", el("bdi", { title: full }, source), source ? " · " : "", `operations ${born + 1}–${dies + 1}`),
        el("div", { class: "second code" }, user(groups.aval[g])));
    }));
  }

  // Reads the chart's points, which also count the small values that are not in the page.
  function liveByKind(step) {
    let point = data.chart.at.findIndex((s) => s > step) - 1;
    if (point < 0) point = data.chart.at.length - 1;
    return kinds.map((_, k) => data.chart.live[k][point]);
  }

  return { show };
}
