// The table of values by group: sorted and filtered. A click on a group lists its values.

function makeTable(root, step) {
  const AT_ONCE = 60;
  const INNER_AT_ONCE = 40;
  const columns = [
    { key: "what", title: "Value", width: "25%", descending: false },
    { key: "kind", title: "Kind", width: "124px", descending: false },
    { key: "peak", title: "At the peak", width: "118px", number: true, descending: true },
    { key: "bytes", title: "All", width: "92px", number: true, descending: true },
    { key: "aval", title: "Type", width: "14%", descending: false },
    { key: "source", title: "Source", width: "23%", descending: false },
    { key: "time", title: "To recompute", width: "134px", number: true, descending: true },
    { key: "born", title: "Lifetime", width: "12%", descending: false },
  ];
  const head = root.querySelector("#table thead tr");
  const body = root.querySelector("#table tbody");
  const more = root.querySelector("#more");
  const count = root.querySelector("#count");
  const box = root.querySelector("#filter");
  const menu = root.querySelector("#sort");
  const chips = root.querySelector("#kinds");
  const sorting = { key: "peak", descending: true };
  const chosen = new Set();
  const open = new Map(); // expanded group -> number of its values that are shown
  let at = null; // if not null, only values that are live at this operation are shown
  let rows = [];
  let limit = AT_ONCE;

  // The rank of each string in alphabetical order, computed once, by which rows are sorted.
  const collator = new Intl.Collator("en", { numeric: true });
  const places = new Uint32Array(strings.length);
  strings.map((_, i) => i).sort((a, b) => collator.compare(strings[a], strings[b])).forEach((i, place) => { places[i] = place; });

  const bornOf = (value) => (livesFrom[value] < livesFrom[value + 1] ? lives.born[livesFrom[value]] : nSteps); // live intervals precede reserved ones

  // For each group the bytes that it holds at the peak.
  const groupAtPeak = new Float64Array(groups.count.length);
  values.group.forEach((g, value) => { groupAtPeak[g] += atPeak[value]; });

  function matcher() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return null;
    const hits = words.map((word) => Uint8Array.from(strings, (text) => text.toLowerCase().includes(word)));
    return (value) => {
      const g = values.group[value];
      return hits.every((hit) => hit[groups.aval[g]] || hit[groups.source[g]] || hit[groups.primitive[g]]
        || hit[values.what[value]] || hit[values.name[value]] || hit[values.consumer[value]]);
    };
  }

  // Computes the rows: the groups that pass the filters, each with its values that pass.
  function compute() {
    const matches = matcher();
    const live = at === null ? null : liveAt(at);
    const filtered = matches || live;
    rows = [];
    for (let g = 0; g < groups.count.length; g++) {
      if (chosen.size && !chosen.has(groups.kind[g])) continue;
      if (!filtered) {
        rows.push({ g, n: groups.count[g], peak: groupAtPeak[g], bytes: groups.bytes[g], flops: groups.flops[g], time: groups.time[g], born: bornOf(groupFrom[g]), values: null });
        continue;
      }
      const row = { g, n: 0, peak: 0, bytes: 0, flops: 0, time: 0, born: nSteps, values: [] };
      for (let value = groupFrom[g]; value < groupFrom[g + 1]; value++) {
        if ((live && !live[value]) || (matches && !matches(value))) continue;
        row.n += values.count[value];
        row.peak += atPeak[value];
        row.bytes += values.bytes[value];
        row.flops += values.flops[value];
        row.time += values.time[value];
        row.born = Math.min(row.born, bornOf(value));
        row.values.push(value);
      }
      if (row.n) rows.push(row);
    }
    const sign = sorting.descending ? -1 : 1;
    const by = {
      what: (r) => places[groups.pattern[r.g]], kind: (r) => groups.kind[r.g], bytes: (r) => r.bytes, peak: (r) => r.peak,
      aval: (r) => places[groups.aval[r.g]], source: (r) => places[groups.source[r.g]],
      time: (r) => (r.time || r.flops / 1e30), born: (r) => r.born,
    }[sorting.key];
    rows.sort((a, b) => sign * (by(a) - by(b)) || b.bytes - a.bytes || a.g - b.g);
  }

  function lifetime(intervals) {
    const bar = el("span", { class: "life" });
    const place = (n) => `${100 * n / nSteps}%`;
    for (const [born, dies, kind] of intervals) {
      bar.append(el("i", { class: `k-${kinds[kind]}`, style: { left: place(born), width: place(dies + 1 - born) } }));
    }
    const mark = step();
    if (mark !== null) bar.append(el("b", { style: { left: place(mark) } }));
    return bar;
  }

  function intervalsOf(value) {
    const found = [];
    for (let i = livesFrom[value]; i < livesFrom[value + 1]; i++) if (lives.kind[i] !== RESERVED) found.push([lives.born[i], lives.dies[i], lives.kind[i]]);
    return found;
  }

  function inWords(intervals) {
    const left = intervals.length - 4;
    return `operations ${intervals.slice(0, 4).map(([born, dies]) => `${born + 1}–${dies + 1}`).join(", ")}` +
      (left > 0 ? ` and ${left.toLocaleString("en")} more time${left === 1 ? "" : "s"}` : "");
  }

  // Returns a source; of a library's line and the user's only the lines, without functions.
  function place(index) {
    const made = user(index);
    if (!strings[index].includes(", from ")) return made;
    const parts = [...made.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE);
    parts.forEach((part) => { part.data = part.data.replace(/ \([^()]*\)/g, ""); });
    return made;
  }

  // Draws when values are live, or says where they are if they have no memory of their own.
  function drawLife(intervals, sample, value) {
    if (intervals.length === 0) return el("span", { class: "muted" }, strings[values.held[value]] || "not in memory by itself");
    return el("span", { title: inWords(intervals) }, lifetime(sample));
  }

  const cost = (flops, time) => (flops || time ? el("span", { title: formatFlops(flops) }, formatSeconds(time)) : "");

  function drawGroup(row, most) {
    const { g, n } = row;
    const expanded = open.has(g);
    const kind = kinds[groups.kind[g]];
    const all = groups.count[g];
    const [some, whole] = [n, all].map((count) => count.toLocaleString("en"));
    const times = n < all ? `${some} of ${whole} ×` : n > 1 ? `${some} ×` : "";
    const own = row.values ? row.values[0] : groupFrom[g];
    const expand = el("button", { type: "button", class: "expand", "aria-expanded": String(expanded), onclick: () => { toggle(g); } },
      el("span", {}, times ? el("span", { class: "times" }, `${times} `) : undefined, user(groups.pattern[g])));
    // Draw the lifetimes of at most 24 values; more would overlap.
    const members = row.values || Array.from({ length: groupFrom[g + 1] - groupFrom[g] }, (_, i) => groupFrom[g] + i);
    const every = Math.max(1, Math.ceil(members.length / 24));
    const sample = members.filter((_, i) => i % every === 0).flatMap(intervalsOf);
    const intervals = members.flatMap(intervalsOf);
    const drawn = [el("tr", { class: `group k-${kind}`, "data-group": g },
      el("td", {}, expand),
      el("td", {}, el("i", { class: "swatch" }), kind),
      el("td", { class: "n" }, row.peak ? formatBytes(row.peak) : "–", el("span", { class: "share", style: { width: `${100 * row.peak / most}%` } })),
      el("td", { class: "n" }, formatBytes(row.bytes)),
      el("td", { class: "code" }, user(groups.aval[g])),
      el("td", {}, place(groups.source[g])),
      el("td", { class: "n again" }, cost(row.flops, row.time)),
      el("td", { class: "wide" }, own === undefined ? "" : drawLife(intervals, sample, own)))];
    if (expanded) drawn.push(...drawValues(g, kind, members, all));
    return drawn;
  }

  function drawValues(g, kind, members, all) {
    const shown = members.slice(0, open.get(g));
    const drawn = shown.map((value) => {
      const intervals = intervalsOf(value);
      const name = values.name[value];
      const consumer = values.consumer[value];
      return el("tr", { class: `child k-${kind}` },
        el("td", {}, values.count[value] > 1 ? `${values.count[value].toLocaleString("en")} × ` : "", user(values.what[value]), strings[name] ? el("span", { class: "tag" }, user(name)) : undefined),
        el("td", {}, strings[groups.primitive[g]] ? user(groups.primitive[g]) : ""),
        el("td", { class: "n" }, atPeak[value] ? formatBytes(atPeak[value]) : "–"),
        el("td", { class: "n" }, formatBytes(values.bytes[value])),
        el("td", { colspan: 2 }, strings[consumer] ? "needed by " : "", strings[consumer] ? user(consumer) : ""),
        el("td", { class: "n again" }, cost(values.flops[value], values.time[value])),
        el("td", { class: "wide" }, intervals.length ? inWords(intervals) : "", drawLife(intervals, intervals, value)));
    });
    const left = members.length - shown.length;
    const missing = groups.hidden[g];
    if (left > 0 || missing > 0) {
      const cell = el("td", { colspan: columns.length });
      if (left > 0) {
        cell.append(el("button", { type: "button", onclick: () => { open.set(g, open.get(g) + 10 * INNER_AT_ONCE); draw(); } },
          `Show ${Math.min(left, 10 * INNER_AT_ONCE)} of ${left} more`));
      } else cell.append(`${missing} smaller values are not in this page; to_json() lists all of them.`);
      drawn.push(el("tr", { class: `child k-${kind}` }, cell));
    }
    return drawn;
  }

  function toggle(g) {
    if (open.has(g)) open.delete(g); else open.set(g, INNER_AT_ONCE);
    draw();
    body.querySelector(`tr[data-group="${g}"] .expand`)?.focus();
  }

  function draw() {
    const most = Math.max(1, ...rows.slice(0, 20000).map((row) => row.peak));
    body.replaceChildren(...rows.slice(0, limit).flatMap((row) => drawGroup(row, most)));
    more.hidden = rows.length <= limit;
    more.textContent = `Show more (${(rows.length - limit).toLocaleString("en")} groups left)`;
    const n = rows.reduce((sum, row) => sum + row.n, 0);
    const bytes = rows.reduce((sum, row) => sum + row.bytes, 0);
    count.textContent = `${n.toLocaleString("en")} value${n === 1 ? "" : "s"} in ${rows.length.toLocaleString("en")} group${rows.length === 1 ? "" : "s"}${n > 1 ? `; sum over the step ${formatBytes(bytes)}, not all at once` : n ? `, ${formatBytes(bytes)}` : ""}`;
  }

  function drawHead() {
    for (const [i, column] of columns.entries()) {
      const cell = head.children[i];
      if (column.key === sorting.key) cell.setAttribute("aria-sort", sorting.descending ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    menu.value = sorting.key;
  }

  function drawChips() {
    const counted = kinds.map(() => 0);
    groups.kind.forEach((kind, g) => { counted[kind] += groups.count[g]; });
    chips.replaceChildren(...kinds.flatMap((kind, k) => (counted[k] === 0 ? [] : [el("button", {
      type: "button", class: `k-${kind}`, "aria-pressed": String(chosen.has(k)), "data-kind": kind,
      onclick: () => { if (!chosen.delete(k)) chosen.add(k); refresh(); chips.querySelector(`[data-kind="${kind}"]`).focus(); },
    }, el("i", { class: "swatch" }), `${kind} `, el("span", { class: "muted" }, counted[k].toLocaleString("en")))])));
    if (at !== null) {
      chips.prepend(el("button", { type: "button", class: "step", "aria-label": `Live at operation ${at + 1}: remove this filter`, onclick: () => listAt(null) }, `live at operation ${(at + 1).toLocaleString("en")} ✕`));
    }
  }

  function refresh() {
    limit = AT_ONCE;
    compute();
    drawHead();
    drawChips();
    draw();
  }

  function sortBy(key, descending) {
    sorting.key = key;
    sorting.descending = descending;
    refresh();
  }

  function listAt(next) {
    at = next;
    refresh();
  }

  head.append(...columns.map((column) => el("th", { scope: "col", class: column.number ? "n" : "", style: { width: column.width } },
    el("button", {
      type: "button", "data-key": column.key,
      onclick: () => sortBy(column.key, sorting.key === column.key ? !sorting.descending : column.descending),
    }, column.title))));
  menu.append(...columns.map((column) => el("option", { value: column.key }, column.title.toLowerCase())));
  menu.addEventListener("change", () => sortBy(menu.value, columns.find((column) => column.key === menu.value).descending));
  box.addEventListener("input", refresh);
  more.addEventListener("click", () => { limit += 5 * AT_ONCE; draw(); });
  refresh();
  return { listAt, draw };
}
