// Reads the data of the page, which payload.py wrote, and defines helpers: numbers as text, and elements
// whose texts are never parsed as markup.

const data = JSON.parse(document.getElementById("data").textContent);

// Expands the columns that are run-length encoded as [content, count, content, count, ...].
function unpack(columns) {
  for (const [name, column] of Object.entries(columns)) {
    if (Array.isArray(column)) continue;
    const all = [];
    for (let i = 0; i < column.runs.length; i += 2) {
      for (let n = column.runs[i + 1]; n > 0; n--) all.push(column.runs[i]);
    }
    columns[name] = all;
  }
}
[data.steps, data.groups, data.values, data.lives].forEach(unpack);

const RESERVED = data.kinds.indexOf("reserved");
const { kinds, phases, strings, segments, groups, values } = data;
const nSteps = data.steps.label.length;
const lives = {
  value: Uint32Array.from(data.lives.value),
  born: Uint32Array.from(data.lives.born),
  dies: Uint32Array.from(data.lives.dies),
  kind: Uint8Array.from(data.lives.kind),
};

// The start of each operation and the end of the last one, in seconds; all 0 if no times are predicted.
const starts = new Float64Array(nSteps + 1);
data.steps.time.forEach((time, i) => { starts[i + 1] = starts[i] + time; });
const timed = nSteps > 0 && starts[nSteps] > 0;

// The index in `lives`, which is sorted by value, of each value's first lifetime.
const livesFrom = new Uint32Array(values.group.length + 1);
lives.value.forEach((value) => { livesFrom[value + 1] += 1; });
for (let i = 0; i < values.group.length; i++) livesFrom[i + 1] += livesFrom[i];

// The index of each group's first value; values are sorted by group.
const groupFrom = new Uint32Array(groups.count.length + 1);
groups.shown.forEach((n, i) => { groupFrom[i + 1] = groupFrom[i] + n; });

function scaled(number, units, base) {
  let unit = 0;
  let left = Math.abs(number);
  while (left >= base && unit < units.length - 1) { left /= base; unit += 1; }
  return [number < 0 ? -left : left, units[unit], unit];
}

const byteUnits = ["B", "KiB", "MiB", "GiB", "TiB"];

// Rounds like the texts that Python wrote: a number halfway between two goes to the even one.
function rounded(x, digits) {
  const scale = 10 ** digits;
  const below = Math.floor(x * scale);
  const isHalf = x * scale - below === 0.5 && Number.isInteger(x * 1024);
  return (isHalf ? (below + below % 2) / scale : x).toFixed(digits);
}

function formatBytes(n) {
  const [left, unit, level] = scaled(n, byteUnits, 1024);
  return `${rounded(left, level ? 1 : 0)} ${unit}`;
}

function formatFlops(n) {
  const [left, unit, level] = scaled(n, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000);
  return `${rounded(left, level ? 1 : 0)} ${unit}`;
}

function formatSeconds(s) {
  if (s === 0) return "0 s";
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    if (Math.abs(s) * factor >= 1) return `${(s * factor).toFixed(1)} ${unit}`;
  }
  return `${(s * 1e9).toFixed(1)} ns`;
}

// Returns an element. Strings become text nodes, so they are never parsed as markup; `undefined` is skipped.
function el(tag, attributes = {}, ...children) {
  const made = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, content] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), content);
    else if (name === "style") Object.assign(made.style, content);
    else if (content !== undefined && content !== false) made.setAttribute(name, content === true ? "" : content);
  }
  made.append(...children.filter((child) => child !== undefined && child !== ""));
  return made;
}

// Returns a text from user code, isolated so that right-to-left characters do not reorder the text around it.
function user(index) {
  const made = el("bdi", { title: strings[index] });
  // A long path may be broken after each slash.
  strings[index].split(/(?<=\/)/).forEach((part, i) => made.append(...(i ? [el("wbr"), part] : [part])));
  return made;
}

// Returns the name of a value whose path is clipped at its end if there is no room for it, and the last module and
// the operation are not.
function clipped(text) {
  const colon = text.lastIndexOf(": ");
  const slash = text.lastIndexOf("/", colon < 0 ? text.length : colon);
  const path = text.slice(0, slash + 1);
  return el("bdi", { title: text, class: "clipped" }, path ? el("span", { class: "path" }, path) : undefined, el("span", {}, text.slice(slash + 1)));
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function groupTitle(g) {
  return strings[groups.pattern[g]];
}

// For each value the bytes that it holds at the peak.
const atPeak = new Float64Array(values.group.length);
for (let i = 0; i < lives.value.length; i++) {
  if (lives.born[i] <= data.peak && data.peak <= lives.dies[i]) atPeak[lives.value[i]] = values.bytes[lives.value[i]];
}

// Returns for each value 1 if its memory is live or reserved at an operation, else 0.
function liveAt(step) {
  const live = new Uint8Array(values.group.length);
  for (let i = 0; i < lives.value.length; i++) {
    if (lives.born[i] <= step && step <= lives.dies[i]) live[lives.value[i]] = 1;
  }
  return live;
}
