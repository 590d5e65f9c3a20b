"use strict";
// Draws the timelines and fills the tables. All texts are set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const colours = new Map(data.colours.map(([key, colour, words]) => [key, { colour, words }]));
const LEFT = 190, LANE = 44, GAP = 8, AXIS = 24; // pixels
const SHORTEST = 10; // ns: no further zoom
const end = Math.max(1, ...data.timelines.map((timeline) => timeline.end));
const view = { from: 0, to: end }; // ns
const search = { text: "", words: new Set(), bars: [], at: -1 };
const byId = (id) => document.getElementById(id);
const theme = {}; // colours of page.css, read once for each drawing

function make(tag, parent, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  if (parent) parent.append(element);
  return element;
}

function duration(ns) {
  const [size, unit] = ns >= 1e9 ? [1e9, "s"] : ns >= 1e6 ? [1e6, "ms"] : ns >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${Number((ns / size).toPrecision(4))} ${unit}`;
}

// ---- Timelines ----

// Adds to each lane `ends`: the latest end of all bars up to each one. So the first bar that reaches into the view can
// be found by bisection, also where bars overlap.
function prepare(lane) {
  let latest = 0;
  lane.ends = lane.bars.start.map((start, n) => (latest = Math.max(latest, start + lane.bars.length[n])));
}

function bisect(sorted, value) { // the first position whose value is larger
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

const width = (canvas) => Math.max(50, canvas.clientWidth - LEFT);
const toTime = (canvas, x) => view.from + ((x - LEFT) / width(canvas)) * (view.to - view.from);

let asked = false;
function redraw() { // once for all changes before the next frame
  if (!asked) requestAnimationFrame(() => ((asked = false), draw()));
  asked = true;
}

function draw() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "grey", "faint", "paper", "mark"]) theme[name] = style.getPropertyValue(`--${name}`).trim();
  for (const { canvas, timeline } of drawn) {
    const ratio = window.devicePixelRatio || 1;
    const rows = timeline.lanes.length + (timeline.memory.at.length ? 1 : 0);
    const height = rows * (LANE + GAP) + AXIS;
    const wide = width(canvas), scale = wide / (view.to - view.from);
    // What the functions below need; asking the canvas for its width again would cost more than a bar.
    const frame = { wide, right: LEFT + wide, x: (time) => LEFT + (time - view.from) * scale };
    canvas.style.height = `${height}px`;
    canvas.width = frame.right * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    timeline.lanes.forEach((lane, row) => drawLane(context, frame, lane, row * (LANE + GAP)));
    if (timeline.memory.at.length) drawMemory(context, frame, timeline.memory, timeline.lanes.length * (LANE + GAP));
    drawAxis(context, frame, rows * (LANE + GAP));
  }
  byId("shown").textContent = `${duration(view.from)} to ${duration(view.to)}, ${duration(view.to - view.from)} of ${duration(end)}`;
}

function drawRow(context, frame, words, top) {
  context.fillStyle = theme.ink;
  context.textAlign = "right";
  context.textBaseline = "middle";
  words.forEach((word, n) => context.fillText(word, LEFT - 10, top + LANE / 2 + 14 * (n - (words.length - 1) / 2)));
  context.fillStyle = theme.faint;
  context.fillRect(LEFT, top, frame.wide, LANE);
}

function bytes(count) {
  const [size, unit] = count >= 2 ** 30 ? [2 ** 30, "GiB"] : count >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  return `${Number((count / size).toPrecision(3))} ${unit}`;
}

// The area below the needed memory; a full row is the largest need of all timelines.
function drawMemory(context, frame, memory, top) {
  const most = data.timelines.reduce((found, { memory }) => memory.bytes.reduce((a, b) => Math.max(a, b), found), 1);
  drawRow(context, frame, ["memory", `up to ${bytes(memory.bytes.reduce((a, b) => Math.max(a, b), 0))}`], top);
  context.fillStyle = theme.grey;
  const { at } = memory;
  for (let n = Math.max(0, bisect(at, view.from) - 1); n < at.length && at[n] < view.to; ) {
    const left = Math.max(LEFT, frame.x(at[n])), edge = Math.floor(left) + 1;
    let needed = memory.bytes[n++]; // of all changes within a pixel, the largest counts
    while (n < at.length && frame.x(at[n]) < edge) needed = Math.max(needed, memory.bytes[n++]);
    const x = Math.round(left), right = Math.round(Math.min(frame.right, frame.x(n < at.length ? at[n] : end)));
    context.fillRect(x, top + LANE * (1 - needed / most), Math.max(1, right - x), (LANE * needed) / most);
  }
}

function drawLane(context, frame, lane, top) {
  drawRow(context, frame, lane.name.split(/(?=, | with )/).map((word) => word.replace(/^, /, "")), top);
  context.save();
  context.beginPath();
  context.rect(LEFT, top, frame.wide, LANE);
  context.clip();
  drawShares(context, frame, lane, top);
  drawBars(context, frame, lane, top);
  context.restore();
}

// A column of one pixel shows which fraction of its time each colour takes. So short bars do not look longer than they are.
function drawShares(context, frame, lane, top) {
  const columns = Math.ceil(frame.wide);
  const filled = new Float64Array(columns); // from below
  for (const [key, pieces] of Object.entries(lane.pieces)) {
    const shares = new Float64Array(columns);
    // Pieces are disjoint and sorted.
    for (let n = Math.max(0, bisect(pieces.start, view.from) - 1); n < pieces.start.length && pieces.start[n] < view.to; n++) {
      const begin = frame.x(pieces.start[n]) - LEFT;
      const stop = frame.x(pieces.start[n] + pieces.length[n]) - LEFT;
      for (let column = Math.max(0, Math.floor(begin)); column < Math.min(columns, stop); column++) {
        shares[column] += Math.min(stop, column + 1) - Math.max(begin, column);
      }
    }
    context.fillStyle = colours.get(key)?.colour ?? theme.grey;
    for (let column = 0; column < columns; ) { // equal neighbours become one rectangle
      const share = Math.min(shares[column], 1 - filled[column]), below = filled[column];
      let next = column + 1;
      while (next < columns && Math.min(shares[next], 1 - filled[next]) === share && filled[next] === below) next++;
      if (share > 0) {
        context.fillRect(LEFT + column, top + LANE * (1 - below - share), next - column, LANE * share);
        filled.fill(below + share, column, next);
      }
      column = next;
    }
  }
}

function drawBars(context, frame, lane, top) {
  const { start, length, name, label } = lane.bars;
  let marked = -1;
  context.textAlign = "center";
  for (let n = bisect(lane.ends, view.from); n < start.length && start[n] < view.to; n++) {
    const x = frame.x(start[n]), right = frame.x(start[n] + length[n]);
    if (search.words.size && (search.words.has(name[n]) || search.words.has(label[n])) && right > marked) {
      context.fillStyle = theme.mark;
      context.fillRect(x, top, Math.max(1.5, right - x), 5);
      marked = Math.max(right, x + 1);
    }
    if (right - x < 6) continue;
    context.fillStyle = theme.paper;
    context.fillRect(x, top, 1, LANE);
    const left = Math.max(x, LEFT), seen = Math.min(right, frame.right) - left;
    const text = data.words[label[n]];
    if (seen > 7 * text.length + 8) {
      context.fillStyle = "#fff";
      context.fillText(text, left + seen / 2, top + LANE / 2);
    }
  }
}

function drawAxis(context, frame, top) {
  const raw = (view.to - view.from) / Math.max(2, frame.wide / 110);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  context.textBaseline = "top";
  context.textAlign = "center";
  for (let time = Math.ceil(view.from / step) * step; time <= view.to; time += step) {
    const x = frame.x(time);
    context.fillStyle = theme.grey;
    context.fillRect(x, top - GAP + 1, 1, 5);
    context.fillText(duration(Math.round(time)), Math.min(x, frame.right - 25), top);
  }
}

function show(from, to) {
  const span = Math.min(end, Math.max(SHORTEST, to - from));
  view.from = Math.min(Math.max(0, from), end - span);
  view.to = view.from + span;
  redraw();
}

function zoom(factor, around = (view.from + view.to) / 2) {
  const span = Math.min(end, Math.max(SHORTEST, (view.to - view.from) * factor));
  const left = (around - view.from) / (view.to - view.from);
  show(around - left * span, around - left * span + span);
}

function barAt(canvas, timeline, x, y) {
  const lane = timeline.lanes[Math.floor(y / (LANE + GAP))];
  if (!lane || x < LEFT || y % (LANE + GAP) > LANE) return null;
  const time = toTime(canvas, x), slack = (view.to - view.from) / width(canvas);
  for (let n = bisect(lane.ends, time - slack); n < lane.bars.start.length && lane.bars.start[n] <= time + slack; n++) {
    if (lane.bars.start[n] + lane.bars.length[n] >= time - slack) return { lane, n };
  }
  return null;
}

function overlapOf(lane, key, from, to) { // ns of [from, to) that are coloured with this key
  const pieces = lane.pieces[key];
  let total = 0;
  if (!pieces) return total;
  for (let n = Math.max(0, bisect(pieces.start, from) - 1); n < pieces.start.length && pieces.start[n] < to; n++) {
    total += Math.max(0, Math.min(to, pieces.start[n] + pieces.length[n]) - Math.max(from, pieces.start[n]));
  }
  return total;
}

function describe({ lane, n }) {
  const bars = lane.bars, begin = bars.start[n], stop = begin + bars.length[n];
  const lines = [data.words[bars.label[n]], data.words[bars.name[n]], `${duration(bars.length[n])}, from ${duration(begin)}`];
  if (lane.pieces.hidden || lane.pieces.exposed) {
    lines.push(`hidden ${duration(overlapOf(lane, "hidden", begin, stop))}, exposed ${duration(overlapOf(lane, "exposed", begin, stop))}`);
  } else if (colours.has(data.words[bars.key[n]])) {
    lines.push(colours.get(data.words[bars.key[n]]).words);
  }
  return lines.join("\n");
}

const drawn = data.timelines.map((timeline) => {
  timeline.lanes.forEach(prepare);
  const figure = make("figure", byId("canvases"));
  const caption = make("figcaption", figure);
  make("b", caption, timeline.title);
  make("span", caption, timeline.summary);
  const canvas = make("canvas", figure);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Timeline of ${timeline.title}: ${timeline.summary}`);
  let grabbed = null;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = (event.deltaX / width(canvas)) * (view.to - view.from);
      show(view.from + shift, view.to + shift);
    } else {
      zoom(1.0015 ** event.deltaY, toTime(canvas, Math.max(LEFT, event.offsetX)));
    }
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    grabbed = { x: event.offsetX, from: view.from, to: view.to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (grabbed = null));
  canvas.addEventListener("pointermove", (event) => {
    if (grabbed) {
      const shift = ((grabbed.x - event.offsetX) / width(canvas)) * (grabbed.to - grabbed.from);
      show(grabbed.from + shift, grabbed.to + shift);
    }
    const bar = grabbed ? null : barAt(canvas, timeline, event.offsetX, event.offsetY);
    const tip = byId("tip");
    tip.hidden = !bar;
    if (bar) {
      tip.textContent = describe(bar);
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    }
  });
  canvas.addEventListener("pointerleave", () => (byId("tip").hidden = true));
  canvas.addEventListener("dblclick", () => show(0, end));
  return { canvas, timeline };
});

addEventListener("keydown", (event) => {
  if (event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
  const shift = (view.to - view.from) / 5;
  const actions = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, end),
    ArrowLeft: () => show(view.from - shift, view.to - shift), ArrowRight: () => show(view.from + shift, view.to + shift),
    "/": () => byId("search").focus(),
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
});

// ---- Search ----

function find(text) {
  search.text = text.trim().toLowerCase();
  search.words = new Set();
  search.bars = [];
  search.at = -1;
  if (search.text) {
    data.words.forEach((word, n) => word.toLowerCase().includes(search.text) && search.words.add(n));
    for (const { timeline } of drawn) {
      for (const lane of timeline.lanes) {
        lane.bars.start.forEach((start, n) => {
          if (search.words.has(lane.bars.name[n]) || search.words.has(lane.bars.label[n])) search.bars.push({ lane, n });
        });
      }
    }
    search.bars.sort((a, b) => a.lane.bars.start[a.n] - b.lane.bars.start[b.n]);
  }
  tellFound();
  for (const row of document.querySelectorAll("tbody tr")) {
    row.classList.toggle("hit", search.text !== "" && row.textContent.toLowerCase().includes(search.text));
  }
  redraw();
}

function tellFound() {
  const count = search.bars.length;
  const place = search.at >= 0 ? `, this is number ${(search.at + 1).toLocaleString("en")}` : "";
  byId("found").textContent = search.text ? `${count.toLocaleString("en")} found${place}` : "";
}

function next() {
  if (!search.bars.length) return;
  search.at = (search.at + 1) % search.bars.length;
  const { lane, n } = search.bars[search.at];
  const middle = lane.bars.start[n] + lane.bars.length[n] / 2;
  const span = Math.min(view.to - view.from, Math.max(8 * lane.bars.length[n], 1000));
  show(middle - span / 2, middle + span / 2);
  tellFound();
}

byId("search").addEventListener("input", (event) => find(event.target.value));
byId("search").addEventListener("keydown", (event) => event.key === "Enter" && next());
byId("next").addEventListener("click", next);
byId("in").addEventListener("click", () => zoom(0.5));
byId("out").addEventListener("click", () => zoom(2));
byId("all").addEventListener("click", () => show(0, end));

// ---- Tables ----

const SIZES = { B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, ns: 1e-6, µs: 1e-3, ms: 1, s: 1e3 };

function value(text) { // a number with a unit in the unit's base; NaN for other text
  const match = /^([-\d.,]+)\s*(%|x|[A-Za-zµ]*)/.exec(text);
  return match ? parseFloat(match[1].replaceAll(",", "")) * (SIZES[match[2]] ?? 1) : NaN;
}

function sort(body, column, down) {
  const rows = [...body.rows];
  const cell = (row) => row.cells[column].textContent;
  rows.sort((a, b) => {
    const [x, y] = [value(cell(a)), value(cell(b))];
    const order = Number.isNaN(x) && Number.isNaN(y) ? cell(a).localeCompare(cell(b)) : Number.isNaN(x) ? -1 : Number.isNaN(y) ? 1 : x - y;
    return down ? -order : order;
  });
  body.append(...rows);
}

const instructions = new Set(drawn.flatMap(({ timeline }) => timeline.lanes.flatMap((lane) => lane.bars.name)).map((n) => data.words[n]));

function fill(table) {
  if (!table.rows.length) return;
  make("h2", byId("tables"), table.title);
  const element = make("table", make("div", byId("tables"), undefined, "scroll"));
  const head = make("tr", make("thead", element)), body = make("tbody", element);
  table.columns.forEach((column, number) => {
    const cell = make("th", head, undefined, column.right ? "right" : "");
    cell.scope = "col";
    const button = make("button", cell, column.name);
    button.type = "button";
    button.addEventListener("click", () => {
      const down = cell.getAttribute("aria-sort") !== "descending";
      for (const other of head.cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", down ? "descending" : "ascending");
      sort(body, number, down);
    });
  });
  for (const texts of table.rows) {
    const row = make("tr", body);
    texts.forEach((text, number) => make("td", row, text, table.columns[number].right ? "right" : ""));
    const instruction = texts.map((text) => text.split(" (")[0]).find((text) => instructions.has(text));
    if (instruction !== undefined) {
      row.classList.add("known");
      row.addEventListener("click", () => {
        byId("search").value = instruction;
        find(instruction);
        next();
        byId("timelines").scrollIntoView({ behavior: "smooth", block: "nearest" });
      });
    }
  }
  if (table.caption) make("p", byId("tables"), table.caption, "caption");
}

// ---- Everything else ----

document.title = byId("title").textContent = data.title;
data.headlines.forEach((text) => make("p", byId("headlines"), text));
if (data.notes.length) {
  byId("notes").hidden = false;
  byId("notes").querySelector("summary").textContent = data.notes.length === 1 ? "1 note" : `${data.notes.length} notes`;
  data.notes.forEach((text) => make("li", byId("notes").querySelector("ul"), text));
}
for (const [key, { colour, words }] of colours) {
  if (!data.timelines.some((timeline) => timeline.lanes.some((lane) => lane.pieces[key]))) continue;
  const entry = make("span", byId("legend"));
  make("i", entry).style.background = colour;
  entry.append(words);
}
data.tables.forEach(fill);
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
draw();
