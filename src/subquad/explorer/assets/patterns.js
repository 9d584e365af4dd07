/* Who attends to whom: two mechanisms, or both directions of one, side by side. */

const data = JSON.parse(find("#data").textContent);
const byName = new Map(data.mechanisms.map((one) => [one.name, one]));
const opened = new Map(); // name → a promise of { chunks, table }
const state = {
  mode: "directions", n: Math.max(0, data.lengths.indexOf(64)), query: 44, layer: 1, length: data.costLengths.indexOf(16384), heads: 8, width: 64,
  sides: [{ name: "", at: [], causal: false, panel: 0 }, { name: "", at: [], causal: true, panel: 0 }],
};
const shown = [null, null]; // what the two sides show: { form, cells, … }, or the reason why not
const tokens = () => data.lengths[state.n];
const possible = (n, causal) => (causal ? (n * (n + 1)) / 2 : n * n);

// ---- what a side shows ----

function choose(side, name) {
  const about = byName.get(name);
  side.name = name;
  side.at = about.controls.map((control) => control.start);
  side.panel = 0;
  const direction = side.causal ? "causal" : "bidirectional";
  if (state.mode === "mechanisms" && !about.directions.includes(direction)) side.causal = !side.causal;
}

function open(name) {
  if (!opened.has(name)) {
    const about = byName.get(name);
    opened.set(name, openBlob(about.blob).then((chunks) => {
      const table = new Map(parseChunk(chunks[about.table]).map((row) => [row.at.join(), row.forms]));
      return { chunks, table, cache: new Map() };
    }));
  }
  return opened.get(name);
}

/** The sets of a side, decoded; cached by mechanism, options, direction, head and length. */
function decode(about, store, side) {
  const n = tokens();
  const place = about.directions.indexOf(side.causal ? "causal" : "bidirectional");
  if (place < 0) return { missing: `${about.name} is ${about.directions[0]} only.` };
  const form = store.table.get(side.at.join())[place];
  if (form.error) return { missing: form.error };
  const key = [side.at, place, side.panel, n].join(";");
  if (!store.cache.has(key)) {
    const sets = form.sets[n];
    const panel = Math.min(side.panel, sets.panels.length - 1);
    store.cache.set(key, {
      n, form, sets, panel, causal: side.causal, about,
      cells: unpackCells(store.chunks[sets.panels[panel][1]], n * n),
      families: sets.families.map((number) => unpackBits(store.chunks[number], n)),
      summaries: sets.summaries == null ? null : readSummaries(store.chunks[sets.summaries]),
      hops: [],
    });
  }
  return store.cache.get(key);
}

function unpackCells(chunk, count) {
  const cells = new Uint8Array(count);
  for (let i = 0; i < count; i++) cells[i] = (chunk[i >> 2] >> (2 * (i & 3))) & 3;
  return cells;
}

/** Rows of bits, 32 tokens to a word. */
function unpackBits(chunk, n) {
  const width = Math.ceil(n / 32);
  return Array.from({ length: n }, (_, row) => {
    const words = new Uint32Array(width);
    for (let j = 0; j < n; j++) {
      const bit = row * n + j;
      if ((chunk[bit >> 3] >> (bit & 7)) & 1) words[j >> 5] |= 1 << (j & 31);
    }
    return words;
  });
}

function readSummaries(chunk) {
  const [sets, unique, which] = parseChunk(chunk);
  return { sets: sets.map(membersOf), rows: which.map((at) => unique[at]) };
}

/** S^t: whom a token has seen after t layers. S^1 is the first family; a layer joins the sets of those it sees. */
function hopSets(side, t) {
  while (side.hops.length < t) {
    const before = side.hops[side.hops.length - 1];
    const family = side.families[side.hops.length % side.families.length];
    side.hops.push(before ? family.map((row) => joined(row, before, side.n)) : family);
  }
  return side.hops[t - 1];
}

function joined(row, before, n) {
  const found = new Uint32Array(row.length);
  for (let j = 0; j < n; j++) {
    if ((row[j >> 5] >>> (j & 31)) & 1) for (let w = 0; w < found.length; w++) found[w] |= before[j][w];
  }
  return found;
}

const has = (words, j) => (words[j >> 5] >>> (j & 31)) & 1;

// ---- controls ----

function makeSides() {
  state.sides.forEach((side, number) => {
    const card = element("article", { class: "card side", id: `side${number}` },
      element("div", { class: "pick" }), element("p", { class: "what" }), element("div", { class: "options" }),
      element("div", { class: "drawing" },
        element("canvas", { class: "matrix", tabindex: "0", role: "img" }), element("canvas", { class: "arcs", role: "img", "aria-label": "The keys and summaries of the query, as arcs" })),
      element("div", { class: "missing", hidden: true }),
      element("p", { class: "say", "aria-live": "polite" }), element("p", { class: "note" }),
      element("dl", { class: "figures" }));
    find("#sides").append(card);
    const canvas = find(".matrix", card);
    canvas.addEventListener("pointermove", (event) => pointAt(canvas, event, false));
    canvas.addEventListener("pointerdown", (event) => pointAt(canvas, event, true));
    canvas.addEventListener("keydown", onKey);
    find(".arcs", card).addEventListener("pointermove", (event) => pointAlong(event));
  });
}

function pointAt(canvas, event) {
  const box = canvas.getBoundingClientRect();
  setQuery(Math.floor(((event.clientY - box.top) / box.height) * tokens()));
}

function pointAlong(event) {
  const box = event.currentTarget.getBoundingClientRect();
  setQuery(Math.floor(((event.clientX - box.left) / box.width) * tokens()));
}

function onKey(event) {
  const moves = {
    ArrowUp: () => setQuery(state.query - 1), ArrowDown: () => setQuery(state.query + 1),
    Home: () => setQuery(0), End: () => setQuery(tokens() - 1),
    ArrowLeft: () => setLayer(state.layer - 1), ArrowRight: () => setLayer(state.layer + 1),
  };
  if (!moves[event.key]) return;
  event.preventDefault();
  moves[event.key]();
}

function setQuery(value) {
  const next = Math.max(0, Math.min(tokens() - 1, value));
  if (next !== state.query) { state.query = next; redraw(); }
}

function setLayer(value) {
  const next = Math.max(1, Math.min(Number(find("#layer").max), value));
  if (next !== state.layer) { state.layer = next; redraw(); }
}

/** The selects of a side: mechanism, direction, heads, options. */
function fillControls(number) {
  const side = state.sides[number], card = find(`#side${number}`);
  const about = byName.get(side.name), follows = state.mode === "directions" && number === 1;
  const names = element("select", { class: "name", "aria-label": "Mechanism", onchange: (event) => { choose(side, event.target.value); update(); } });
  for (const family of new Set(data.mechanisms.map((one) => one.family))) {
    const group = element("optgroup", { label: family || "full attention" });
    for (const one of data.mechanisms) {
      if (one.family === family) group.append(element("option", { selected: one.name === side.name }, one.name));
    }
    names.append(group);
  }
  const picked = [follows ? element("strong", {}, side.name) : names];
  if (state.mode === "directions") {
    picked.push(element("span", { class: "small direction" }, side.causal ? "causal" : "bidirectional"));
  } else {
    picked.push(select("Direction", about.directions, about.directions.indexOf(side.causal ? "causal" : "bidirectional"),
      (at) => { side.causal = about.directions[at] === "causal"; update(); }, "direction"));
  }
  find(".pick", card).replaceChildren(...picked);
  const paper = about.paper ? ` ${about.paper}.` : "";
  find(".what", card).textContent = `${about.about}${paper} Cost ${about.cost || "n²"}.`;
  const options = follows ? [] : about.controls.map((control, place) =>
    element("label", { title: control.help }, `${control.name} `,
      select(control.name, control.values.map((value) => (value === "None" ? "auto" : value)), side.at[place],
        (at) => { side.at[place] = at; update(); })));
  find(".options", card).replaceChildren(...options);
}

function select(label, values, at, change, kind = "") {
  const made = element("select", { "aria-label": label, class: kind, onchange: (event) => change(event.target.selectedIndex) });
  values.forEach((value, place) => made.append(element("option", { selected: place === at }, value)));
  return made;
}

function fillHeads(number) {
  const side = state.sides[number], found = shown[number];
  const old = find(`#side${number} .pick .head`);
  if (old) old.remove();
  if (!found || found.missing || found.sets.panels.length < 2) return;
  find(`#side${number} .pick`).append(select("Heads", found.sets.panels.map((panel) => panel[0]), found.panel,
    (at) => { side.panel = at; update(); }, "head"));
}

/** After a change of mechanism, options, direction or length: open what is needed, then draw. */
async function update() {
  if (state.mode === "directions") {
    const [first, second] = state.sides;
    Object.assign(second, { name: first.name, at: [...first.at], panel: first.panel });
    first.causal = false;
    second.causal = true;
  }
  state.query = Math.min(state.query, tokens() - 1);
  const wanted = JSON.stringify(state.sides);
  const stores = await Promise.all(state.sides.map((side) => open(side.name)));
  if (wanted !== JSON.stringify(state.sides)) return; // another choice was made meanwhile
  state.sides.forEach((side, number) => {
    fillControls(number);
    shown[number] = decode(byName.get(side.name), stores[number], side);
    fillHeads(number);
  });
  const steps = shown.map((one) => (one.missing ? 1 : one.sets.steps || 2 * one.n));
  find("#layer").max = Math.max(2, Math.min(tokens(), Math.max(...steps)));
  state.layer = Math.min(state.layer, Number(find("#layer").max));
  remember();
  redraw();
}

// ---- drawing ----

const redraw = once(() => {
  const n = tokens();
  Object.assign(find("#n"), { max: data.lengths.length - 1, value: state.n });
  Object.assign(find("#query"), { max: n - 1, value: state.query });
  find("#layer").value = state.layer;
  find("#n-out").textContent = n;
  find("#query-out").textContent = state.query;
  find("#layer-out").textContent = state.layer;
  drawLegend();
  shown.forEach((one, number) => one && drawSide(one, number));
  drawCost();
  document.documentElement.dataset.ready = "yes";
});

function drawLegend() {
  const kinds = state.layer === 1
    ? [["direct", "direct"], ["summary", "through a summary"], ["none", "unattended"]]
    : [["seen", `seen within ${plural(state.layer - 1, "layer")}`], ["fresh", `new with layer ${state.layer}`], ["none", "not reached"]];
  find("#legend").replaceChildren(...kinds.map(([name, words]) =>
    element("li", {}, element("i", { style: `background:var(--${name})` }), words)));
}

function drawSide(one, number) {
  const card = find(`#side${number}`);
  find(".missing", card).hidden = !one.missing;
  find(".drawing", card).hidden = Boolean(one.missing);
  find(".note", card).textContent = one.missing ? "" : [one.about.note, one.form.note].filter(Boolean).join(" ");
  if (one.missing) {
    find(".missing", card).textContent = one.missing;
    find(".say", card).textContent = "";
    find(".figures", card).replaceChildren();
    return;
  }
  const kinds = kindsOf(one, state.layer);
  drawMatrix(find(".matrix", card), one, kinds);
  drawArcs(find(".arcs", card), one);
  find(".say", card).textContent = sayQuery(one);
  const figures = state.layer === 1 ? countsOf(one) : reachOf(one);
  find(".figures", card).replaceChildren(...figures.map(([label, name, value]) =>
    element("div", {}, element("dt", {}, label), element("dd", { "data-figure": name }, value))));
}

/** The colour of every cell: 0 none, 1 direct, 2 summary; after several layers 3 seen before, 4 new. */
function kindsOf(one, layer) {
  if (layer === 1) return one.cells;
  const [before, after] = [hopSets(one, layer - 1), hopSets(one, layer)];
  const kinds = new Uint8Array(one.n * one.n);
  for (let i = 0; i < one.n; i++) {
    for (let j = 0; j < one.n; j++) kinds[i * one.n + j] = has(before[i], j) ? 3 : has(after[i], j) ? 4 : 0;
  }
  return kinds;
}

function drawMatrix(canvas, one, kinds) {
  const side = canvas.parentElement.clientWidth, n = one.n;
  const context = fitted(canvas, side, side);
  const palette = ["none", "direct", "summary", "seen", "fresh", "future"].map(rgb);
  const image = new ImageData(n, n);
  for (let at = 0; at < n * n; at++) {
    const ahead = one.causal && at % n > Math.floor(at / n);
    const [r, g, b] = palette[ahead && !kinds[at] ? 5 : kinds[at]];
    image.data.set([r, g, b, 255], 4 * at);
  }
  const small = drawMatrix.small || (drawMatrix.small = document.createElement("canvas"));
  [small.width, small.height] = [n, n];
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, side, side);
  const cell = side / n;
  if (cell >= 7) drawLines(context, n, cell, side);
  context.strokeStyle = colour("mark");
  context.lineWidth = 2;
  context.strokeRect(1, state.query * cell, side - 2, cell);
  canvas.setAttribute("aria-label", `${one.about.name}, ${one.causal ? "causal" : "bidirectional"}, ${n} tokens. ${sayQuery(one)}`);
}

function drawLines(context, n, cell, side) {
  context.strokeStyle = colour("card");
  context.lineWidth = 1;
  context.beginPath();
  for (let i = 1; i < n; i++) {
    context.moveTo(i * cell, 0); context.lineTo(i * cell, side);
    context.moveTo(0, i * cell); context.lineTo(side, i * cell);
  }
  context.stroke();
}

const keysOf = (one, query, kind) => {
  const found = [];
  for (let j = 0; j < one.n; j++) if (one.cells[query * one.n + j] === kind) found.push(j);
  return found;
};

/** Arcs from the query to its keys, and to its summaries, whose tokens have a bar below them. */
function drawArcs(canvas, one) {
  const width = canvas.parentElement.clientWidth, height = 150, cell = width / one.n, base = height - 34;
  const context = fitted(canvas, width, height), x = (j) => (j + 0.5) * cell, from = x(state.query);
  const arc = (to, name, thick) => {
    const middle = (from + to) / 2, reach = Math.abs(to - from) / 2;
    context.strokeStyle = colour(name);
    context.lineWidth = thick;
    context.beginPath();
    context.ellipse(middle, base, Math.max(reach, 0.1), Math.min(base - 4, 10 + reach * 0.62), 0, Math.PI, 2 * Math.PI);
    context.stroke();
  };
  for (let j = 0; j < one.n; j++) {
    context.fillStyle = colour({ 0: "none", 1: "direct", 2: "summary" }[one.cells[state.query * one.n + j]]);
    context.fillRect(x(j) - cell * 0.4, base + 3, cell * 0.8, 7);
  }
  if (state.layer > 1) return drawReach(context, one, base, cell);
  context.globalAlpha = 0.75;
  for (const set of summariesOf(one, state.query)) arc(x((set[0] + set[set.length - 1]) / 2), "summary", 1.6);
  for (const j of keysOf(one, state.query, 1)) arc(x(j), "direct", 1.2);
  context.globalAlpha = 1;
  drawSummaries(context, one, base + 14, cell);
  context.fillStyle = colour("mark");
  context.beginPath();
  context.arc(from, base + 6, Math.max(3, Math.min(6, cell / 2)), 0, 2 * Math.PI);
  context.fill();
}

/** One bar for the tokens of each summary, in as many lanes as they need, at most three. */
function drawSummaries(context, one, top, cell) {
  const ends = [-1, -1, -1];
  context.fillStyle = colour("summary");
  for (const set of summariesOf(one, state.query)) {
    const lane = Math.max(0, ends.findIndex((end) => end < set[0]));
    ends[lane] = Math.max(ends[lane], set[set.length - 1]);
    let first = 0;
    for (let i = 1; i <= set.length; i++) {
      if (i < set.length && set[i] === set[i - 1] + 1) continue;
      context.fillRect(set[first] * cell + 1, top + lane * 6, (set[i - 1] - set[first] + 1) * cell - 2, 4);
      first = i;
    }
  }
}

function drawReach(context, one, base, cell) {
  const [before, after] = [hopSets(one, state.layer - 1)[state.query], hopSets(one, state.layer)[state.query]];
  for (let j = 0; j < one.n; j++) {
    context.fillStyle = colour(has(before, j) ? "seen" : has(after, j) ? "fresh" : "none");
    const tall = has(before, j) ? 40 : has(after, j) ? 70 : 6;
    context.fillRect((j + 0.1) * cell, base - tall, cell * 0.8, tall);
  }
}

const summariesOf = (one, query) => (one.summaries ? one.summaries.rows[query].map((number) => one.summaries.sets[number]) : []);

function sayQuery(one) {
  const q = state.query;
  if (state.layer > 1) {
    const reached = hopSets(one, state.layer)[q].reduce((sum, word) => sum + bitCount(word), 0);
    return `After ${state.layer} layers query ${q} has seen ${plural(reached, "token")}.`;
  }
  const direct = keysOf(one, q, 1).length, far = keysOf(one, q, 2).length, sets = summariesOf(one, q);
  if (!direct && !far) return `Query ${q} sees nobody.`;
  const near = `Query ${q} sees ${plural(direct, "token")} directly`;
  return sets.length ? `${near} and ${plural(far, "more", "more")} through ${plural(sets.length, "summary", "summaries")}.` : `${near}.`;
}

function bitCount(word) {
  let count = 0;
  for (let bits = word; bits; bits &= bits - 1) count++;
  return count;
}

function countsOf(one) {
  let direct = 0, far = 0;
  for (const kind of one.cells) [direct, far] = [direct + (kind === 1), far + (kind === 2)];
  const all = possible(one.n, one.causal);
  return [["direct pairs", "direct", whole(direct)], ["through summaries", "summary", whole(far)],
    ["unattended", "none", whole(all - direct - far)], ["sparsity", "sparsity", percent(1 - (direct + far) / all)]];
}

function reachOf(one) {
  const reached = hopSets(one, state.layer).reduce((sum, row) => sum + row.reduce((part, word) => part + bitCount(word), 0), 0);
  const all = possible(one.n, one.causal), steps = one.sets.steps;
  return [["pairs reached", "reached", whole(reached)], ["of all pairs", "share", percent(reached / all)],
    ["layers until all", "steps", steps == null ? "never" : String(steps)], ["theory", "why", one.sets.why]];
}

// ---- cost ----

function costRows() {
  const at = state.length, n = data.costLengths[at];
  const rows = shown.filter((one) => one && !one.missing).map((one, number) => ({
    name: one.about.name, causal: one.causal, colour: ["first", "second"][number], form: one.form,
    connections: one.form.connections, kept: one.form.kept && one.form.kept[at],
  }));
  const causal = rows.some((row) => row.causal) && rows.every((row) => row.causal);
  rows.push({ name: "full attention", causal, colour: "third", connections: data.costLengths.map((m) => possible(m, causal)), kept: causal ? n : null });
  return rows;
}

function drawCost() {
  const at = state.length, n = data.costLengths[at], rows = costRows(), count = state.heads * state.width;
  Object.assign(find("#length"), { max: data.costLengths.length - 1, value: at });
  find("#length-out").textContent = plural(n, "token");
  find("#figures tbody").replaceChildren(...rows.map((row) => {
    const c = row.connections[at];
    const cells = [["connections", whole(c)], ["flops", short(4 * count * c)], ["scores", bytes(4 * state.heads * c)],
      ["cache", row.kept == null ? "–" : bytes(8 * count * row.kept)]];
    return element("tr", {}, element("td", {}, element("i", { style: `background:var(--${row.colour})` }), `${row.name}, ${row.causal ? "causal" : "bidirectional"}`),
      ...cells.map(([name, text]) => element("td", { "data-figure": name }, text)));
  }));
  const curves = rows.filter((row) => row.form && row.form.counted < n);
  const beyond = curves.length ? ` Beyond ${whole(curves[0].form.counted)} tokens the connections of ${[...new Set(curves.map((row) => row.name))].join(" and ")} are a curve a·n^e + b·n + c through the counts.` : "";
  find("#cost-note").textContent = "FLOPs are those of q·k and weights·v, 4 per connection and channel, in one forward pass; " +
    "memory is in float32. A fast kernel does not store the scores; the cache is what a decoder keeps of the tokens so far." + beyond;
  drawChart(find("#chart"), rows, n);
}

function drawChart(canvas, rows, n) {
  const width = canvas.parentElement.clientWidth < 700 ? canvas.parentElement.clientWidth : canvas.clientWidth, height = 260;
  const context = fitted(canvas, width, height), lengths = data.costLengths, left = 44, right = 10, top = 10, bottom = 26;
  const most = Math.log10(Math.max(...rows.flatMap((row) => row.connections))), least = Math.log10(Math.min(...rows.flatMap((row) => row.connections)));
  const x = (m) => left + ((width - left - right) * Math.log2(m / lengths[0])) / Math.log2(lengths[lengths.length - 1] / lengths[0]);
  const y = (c) => top + ((height - top - bottom) * (most - Math.log10(c))) / (most - least);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("soft");
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  for (let power = Math.ceil(least); power <= most; power += 2) {
    context.fillText(short(10 ** power), 0, y(10 ** power) + 4);
    context.beginPath(); context.moveTo(left, y(10 ** power)); context.lineTo(width - right, y(10 ** power)); context.stroke();
  }
  for (const m of [64, 1024, 16384, 262144]) context.fillText(m < 1024 ? m : `${m / 1024} Ki`, x(m) - 8, height - 6);
  for (const row of [...rows].reverse()) {
    context.strokeStyle = colour(row.colour);
    context.lineWidth = row.form ? 2.4 : 1.6;
    context.setLineDash(row.form ? [] : [5, 4]);
    context.beginPath();
    row.connections.forEach((c, place) => context.lineTo(x(lengths[place]), y(c)));
    context.stroke();
  }
  context.setLineDash([]);
  context.strokeStyle = colour("mark");
  context.lineWidth = 1;
  context.beginPath(); context.moveTo(x(n), top); context.lineTo(x(n), height - bottom); context.stroke();
  for (const row of rows) {
    context.fillStyle = colour(row.colour);
    context.beginPath(); context.arc(x(n), y(row.connections[state.length]), 4, 0, 2 * Math.PI); context.fill();
  }
}

// ---- beginning, and what the address remembers ----

function remember() {
  const kept = { mode: state.mode, n: state.n, sides: state.sides.map(({ name, at, causal }) => ({ name, at, causal })) };
  try { history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(kept))}`); } catch { /* some viewers forbid it */ }
}

function recall() {
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    const fits = (side) => byName.has(side.name) && byName.get(side.name).controls.every((control, i) => control.values[side.at[i]] != null);
    if (!kept.sides.every(fits) || !(kept.n in data.lengths)) return;
    Object.assign(state, { mode: kept.mode === "mechanisms" ? "mechanisms" : "directions", n: kept.n });
    kept.sides.forEach((side, i) => Object.assign(state.sides[i], { name: side.name, at: side.at, causal: Boolean(side.causal) }));
  } catch { /* no address, or one of another page: the page begins as it is */ }
}

function begin() {
  const able = (one) => one.directions.length === 2;
  const summarised = data.mechanisms.find((one) => able(one) && one.family === "combiner") || data.mechanisms.find(able) || data.mechanisms[0];
  const other = data.mechanisms.find((one) => one !== summarised && one.family === "sparse pattern") || summarised;
  choose(state.sides[0], summarised.name);
  choose(state.sides[1], other.name);
  recall();
  makeSides();
  find(`#mode input[value="${state.mode}"]`).checked = true;
  find("#mode").addEventListener("change", (event) => {
    state.mode = event.target.value;
    if (state.mode === "mechanisms" && state.sides[0].name === state.sides[1].name) choose(state.sides[1], other.name);
    state.sides[1].causal = state.mode === "directions" || (state.sides[0].causal && byName.get(state.sides[1].name).directions.includes("causal"));
    if (state.mode === "mechanisms") state.sides.forEach((side) => { if (!byName.get(side.name).directions.includes(side.causal ? "causal" : "bidirectional")) side.causal = !side.causal; });
    update();
  });
  const on = (id, change) => find(id).addEventListener("input", (event) => change(Number(event.target.value)));
  on("#n", (value) => { state.n = value; update(); });
  on("#query", setQuery);
  on("#layer", setLayer);
  on("#length", (value) => { state.length = value; redraw(); });
  on("#heads", (value) => { state.heads = value; redraw(); });
  on("#width", (value) => { state.width = value; redraw(); });
  find("#play").addEventListener("click", play);
  window.addEventListener("resize", redraw);
  setUpTheme(redraw);
  update().catch(complainInPage);
}

/** Add a layer every second until nothing changes any more. */
function play() {
  const button = find("#play");
  if (play.timer) { clearInterval(play.timer); play.timer = null; }
  else {
    if (state.layer === Number(find("#layer").max)) setLayer(1);
    play.timer = setInterval(() => {
      if (state.layer === Number(find("#layer").max)) play();
      else setLayer(state.layer + 1);
    }, 900);
  }
  button.setAttribute("aria-pressed", String(Boolean(play.timer)));
  button.textContent = play.timer ? "❚❚ Stop" : "▶ Grow";
}

begin();
