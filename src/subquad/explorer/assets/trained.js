/* What a trained model attends to: the text, the map of all weights, the weights of one token, the heads. */

const data = JSON.parse(find("#data").textContent);
const n = data.tokens.length;
const state = { layer: 0, head: 0, token: Math.floor(n / 2), shade: "weight", graph: false, sort: false, metric: "entropy",
  view: { row: 0, column: 0, size: n } }; // the map shows `size` tokens from (row, column) on
const METRICS = {
  entropy: ["entropy, bits", "The mean entropy of a query's weights: 0 = all on one token.", (v) => v.toFixed(2)],
  distance: ["distance, tokens", "The mean of Σ weight · |i − j|: how far a head looks.", (v) => v.toFixed(v < 100 ? 1 : 0)],
  summaries: ["mass on summaries", "The share of the attention that goes through summaries.", percent],
  density: ["density", "Pairs with a weight above 0, of all that are possible; in a sampled graph, its edges.", percent],
};
const opened = new Map();
let now = null; // the head that is shown, decoded

const layer = () => data.layers[state.layer];

// ---- decoding ----

async function openHead() {
  const key = `${state.layer},${state.head}`;
  if (!opened.has(key)) {
    const [chunks, sets] = [await openBlob(layer().heads[state.head].blob), await openSets(layer())];
    opened.set(key, decodeHead(chunks, sets, layer()));
  }
  return opened.get(key);
}

async function openSets(one) {
  if (!one.members) one.members = parseChunk((await openBlob(one.sets))[0]).map((runs) => Int32Array.from(membersOf(runs)));
  return one.members;
}

const u16 = (chunk) => new Uint16Array(chunk.slice().buffer);

function decodeHead([counts, steps, low, high, entropy, distance, mass, received, degree, shares, clusters, graph], sets, one) {
  const start = new Uint32Array(n + 1), index = u16(steps), weight = new Float32Array(low.length);
  for (let i = 0; i < n; i++) start[i + 1] = start[i] + counts[i];
  for (let i = 0; i < n; i++) for (let e = start[i] + 1; e < start[i + 1]; e++) index[e] += index[e - 1];
  for (let e = 0; e < weight.length; e++) weight[e] = ((low[e] + 256 * high[e]) / 65535) ** 2;
  const offsets = [0];
  for (const set of sets) offsets.push(offsets[offsets.length - 1] + set.length);
  const by = (chunk, change) => Float32Array.from(u16(chunk), change);
  const head = { start, index, weight, sets, offsets, shares: one.shared ? Float32Array.from(shares, (x) => (x / 255) ** 2) : null,
    entropy: by(entropy, (x) => x / 4096), distance: by(distance, (x) => x / 4), mass: by(mass, (x) => x / 65535),
    received: by(received, (x) => n * (x / 65535) ** 2), degree: u16(degree), clusters: clusters.length ? u16(clusters) : null,
    graph: graph.length ? graph : null };
  if (head.clusters) head.order = Array.from({ length: n }, (_, i) => i).sort((a, b) => head.clusters[a] - head.clusters[b] || a - b);
  return head;
}

/** What token `at` of summary g has of it; where shares were left out, all have the same. */
const share = (head, g, at) => (head.shares ? head.shares[head.offsets[g] + at] : 1 / head.sets[g].length);

/** The weight of every token for a query: direct, and through summaries. */
function weightsOf(head, query) {
  const direct = new Float32Array(n), far = new Float32Array(n);
  for (let e = head.start[query]; e < head.start[query + 1]; e++) {
    const to = head.index[e];
    if (to < n) direct[to] += head.weight[e];
    else head.sets[to - n].forEach((j, at) => { far[j] += head.weight[e] * share(head, to - n, at); });
  }
  return { direct, far };
}

// ---- the text ----

const LINE = 22;
const text = { lines: [], places: null, font: "13px ui-monospace, Menlo, Consolas, monospace" };
const visible = (token) => token.replace(/\n/g, "⏎").replace(/\t/g, "→").replace(/\r/g, "␍") || "∅";

/** Where each token stands: line and pixels. Lines end at a line end of the text or where they are full. */
function layOut() {
  const context = find("#text canvas").getContext("2d"), width = find("#text").clientWidth - 24, widths = new Map();
  context.font = text.font;
  text.lines = [[]];
  text.places = new Float32Array(3 * n); // line, x, width
  let x = 10;
  data.tokens.forEach((token, i) => {
    const shown = visible(token);
    if (!widths.has(shown)) widths.set(shown, Math.max(6, context.measureText(shown).width) + 1);
    const w = Math.min(widths.get(shown), width);
    if (x + w > width + 10 && x > 10) { text.lines.push([]); x = 10; }
    text.lines[text.lines.length - 1].push(i);
    text.places.set([text.lines.length - 1, x, w], 3 * i);
    x += w;
    if (token.endsWith("\n")) { text.lines.push([]); x = 10; }
  });
  find("#text > div").style.height = `${Math.max(0, text.lines.length * LINE + 16 - find("#text").clientHeight)}px`;
}

function drawText() {
  const box = find("#text"), height = box.clientHeight, context = fitted(find("#text canvas"), box.clientWidth, height);
  const { direct, far } = weightsOf(now, state.token);
  const most = Math.max(...direct, ...far, 1e-6), loud = Math.max(...now.received, 1e-6);
  const paints = [rgb("direct"), rgb("summary"), rgb("fresh")], ink = colour("ink"), inks = new Map();
  const first = Math.max(0, Math.floor((box.scrollTop - 8) / LINE)), last = Math.min(text.lines.length, first + Math.ceil(height / LINE) + 1);
  context.font = text.font;
  context.textBaseline = "middle";
  for (let line = first; line < last; line++) {
    const y = line * LINE + 8 - box.scrollTop;
    for (const i of text.lines[line]) {
      const [x, w] = [text.places[3 * i + 1], text.places[3 * i + 2]];
      let [paint, strength] = far[i] > direct[i] ? [paints[1], far[i] / most] : [paints[0], direct[i] / most];
      if (state.shade === "received") [paint, strength] = [paints[2], now.received[i] / loud];
      if (state.shade === "cluster" && now.clusters) [paint, strength] = [hue(now.clusters[i]), 0.3];
      const alpha = strength > 0 ? (0.08 + 0.87 * Math.sqrt(strength)).toFixed(2) : "0", key = `${paint},${alpha}`;
      if (strength > 0) {
        context.fillStyle = `rgba(${key})`;
        context.fillRect(x, y + 1, w, LINE - 2);
        if (!inks.has(key)) inks.set(key, colour(readable(paint, Number(alpha))));
      }
      if (i === state.token) { context.strokeStyle = colour("mark"); context.lineWidth = 2; context.strokeRect(x, y + 1, w, LINE - 2); }
      context.fillStyle = strength > 0 ? inks.get(key) : ink;
      context.fillText(visible(data.tokens[i]), x + 0.5, y + LINE / 2);
    }
  }
}

/** A colour for each cluster: neighbours differ by the golden angle. */
function hue(cluster) {
  const angle = ((cluster * 137.508) % 360) / 60, f = (k) => Math.round(255 * (0.5 - 0.38 * Math.max(-1, Math.min(1, Math.min((k + angle) % 6 - 2, 4 - ((k + angle) % 6))))));
  return [f(5), f(3), f(1)];
}

function tokenAt(event) {
  const box = find("#text"), edge = box.getBoundingClientRect();
  const line = text.lines[Math.floor((event.clientY - edge.top + box.scrollTop - 8) / LINE)], x = event.clientX - edge.left;
  return line && line.length ? line.find((i) => x < text.places[3 * i + 1] + text.places[3 * i + 2]) ?? line[line.length - 1] : null;
}

function moveLines(by) {
  const from = text.places[3 * state.token], x = text.places[3 * state.token + 1];
  for (let to = Math.max(0, Math.min(text.lines.length - 1, from + by)); to >= 0 && to < text.lines.length; to += Math.sign(by)) {
    const line = text.lines[to];
    if (line.length) return setToken(line.find((i) => x < text.places[3 * i + 1] + text.places[3 * i + 2]) ?? line[line.length - 1], true);
  }
}

function setToken(token, reveal = false) {
  state.token = Math.max(0, Math.min(n - 1, token));
  if (reveal) {
    const box = find("#text"), y = text.places[3 * state.token] * LINE;
    if (y < box.scrollTop) box.scrollTop = y;
    if (y + 2 * LINE > box.scrollTop + box.clientHeight) box.scrollTop = y + 2 * LINE - box.clientHeight;
  }
  redraw();
}

// ---- the map ----

const place = (i) => (state.sort && now.rank ? now.rank[i] : i);

/** Every kept weight in view goes into the pixel it falls on; a pixel shows the largest. Only visible rows are read. */
function drawMap() {
  const canvas = find("#map"), side = Math.round(canvas.parentElement.clientWidth - 40), view = state.view;
  const context = fitted(canvas, side, side), scale = side / view.size;
  const image = new ImageData(side, side), near = new Float32Array(side * side), far = new Float32Array(side * side);
  if (state.graph && now.graph) paintGraph(near, side, scale);
  else paintWeights(near, far, side, scale);
  const full = state.graph && now.graph ? 1 : fullColour(near, far);
  const [empty, blue, orange] = [rgb("none"), rgb("direct"), rgb("summary")];
  for (let at = 0; at < near.length; at++) {
    const paint = far[at] > near[at] ? orange : blue, t = Math.min(1, Math.max(near[at], far[at]) / full) ** 0.4;
    for (let c = 0; c < 3; c++) image.data[4 * at + c] = empty[c] + (paint[c] - empty[c]) * t;
    image.data[4 * at + 3] = 255;
  }
  const small = drawMap.small || (drawMap.small = document.createElement("canvas"));
  [small.width, small.height] = [side, side];
  small.getContext("2d").putImageData(image, 0, 0);
  context.drawImage(small, 0, 0, side, side);
  const y = (place(state.token) - view.row) * scale;
  context.strokeStyle = colour("mark");
  context.lineWidth = 1.5;
  context.strokeRect(0.75, y - 0.5, side - 1.5, Math.max(scale, 2) + 1);
  const last = (from) => whole(Math.min(n - 1, Math.ceil(from + view.size) - 1));
  find("#where").textContent = `Queries ${whole(Math.ceil(view.row))} – ${last(view.row)}, keys ${whole(Math.ceil(view.column))} – ${last(view.column)}` +
    (state.sort ? ", ordered by cluster." : ".") + (state.graph && now.graph && layer().graph < n ? ` A square of the graph is ${Math.round(n / layer().graph)} tokens wide.` : "") +
    (state.graph && now.graph ? "" : ` Full colour: weights from ${weightText(full)} on.`);
}

/** The weight from which a pixel has the full colour: weights of long texts are small, so it is that of the largest
 * hundredth in view, found by counting logarithms. */
function fullColour(near, far) {
  const bins = new Uint32Array(512);
  let count = 0, above = 0, bin = 0;
  for (let at = 0; at < near.length; at++) {
    const w = Math.max(near[at], far[at]);
    if (w > 0) { bins[Math.max(0, Math.min(511, Math.floor(-16 * Math.log2(w))))]++; count++; }
  }
  while (bin < 512 && above + bins[bin] < Math.max(1, 0.01 * count)) above += bins[bin++];
  return count ? 2 ** (-bin / 16) : 1;
}

function paintWeights(near, far, side, scale) {
  const { row, column, size } = state.view, sorted = state.sort && now.order;
  const wide = Math.max(1, Math.ceil(scale));
  const put = (into, i, j, w, count = 1) => {
    const top = Math.max(0, Math.floor((i - row) * scale)), bottom = Math.min(side, Math.max(top + 1, Math.floor((i - row + 1) * scale)));
    const left = Math.max(0, Math.floor((j - column) * scale)), right = Math.min(side, Math.max(left + 1, count === 1 ? left + wide : Math.floor((j - column + count) * scale)));
    for (let y = top; y < bottom; y++) for (let x = left; x < right; x++) if (into[y * side + x] < w) into[y * side + x] = w;
  };
  const first = Math.max(0, Math.floor(row)), last = Math.min(n, Math.ceil(row + size));
  for (let at = first; at < last; at++) {
    const i = sorted ? now.order[at] : at;
    for (let e = now.start[i]; e < now.start[i + 1]; e++) {
      const to = now.index[e];
      if (to < n) {
        const j = place(to);
        if (j + 1 > column && j < column + size) put(near, at, j, now.weight[e]);
      } else paintSummary(put, far, at, to - n, now.weight[e], scale);
    }
  }
}

/** A summary: its tokens one by one where they are wide enough, else the whole of a run at its mean. */
function paintSummary(put, far, at, g, w, scale) {
  const set = now.sets[g], { column, size } = state.view;
  if (set[set.length - 1] < column || set[0] >= column + size) return;
  const solid = set[set.length - 1] - set[0] + 1 === set.length;
  if (solid && scale < 2 && !state.sort) return put(far, at, set[0], w / set.length, set.length);
  for (let m = 0; m < set.length; m++) {
    const j = place(set[m]);
    if (j + 1 > column && j < column + size) put(far, at, j, w * share(now, g, m));
  }
}

function paintGraph(near, side, scale) {
  const { row, column } = state.view, squares = layer().graph;
  const at = (pixel, from) => {
    const token = Math.floor(from + (pixel + 0.5) / scale);
    if (token < 0 || token >= n) return -1;
    const real = state.sort && now.order ? now.order[token] : token;
    return Math.min(squares - 1, Math.floor((real * squares) / n));
  };
  const columns = Int32Array.from({ length: side }, (_, x) => at(x, column));
  for (let y = 0; y < side; y++) {
    const line = at(y, row);
    if (line < 0) continue;
    for (let x = 0; x < side; x++) if (columns[x] >= 0) near[y * side + x] = now.graph[line * squares + columns[x]] / 255;
  }
}

function zoom(factor, x = 0.5, y = 0.5) {
  const view = state.view, size = Math.max(Math.min(16, n), Math.min(n, view.size * factor));
  view.column += (view.size - size) * x;
  view.row += (view.size - size) * y;
  view.size = size;
  move(0, 0);
}

function move(columns, rows) {
  const view = state.view, inside = (value) => Math.max(0, Math.min(n - view.size, value));
  view.column = inside(view.column + columns);
  view.row = inside(view.row + rows);
  redrawMap();
}

function setUpMap() {
  const canvas = find("#map"), pointers = new Map();
  let gap = 0, moved = 0;
  const spot = (event) => { const box = canvas.getBoundingClientRect(); return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height]; };
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(Math.exp(event.deltaY * 0.0015), ...spot(event)); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); pointers.set(event.pointerId, event); moved = 0; gap = 0; });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    pointers.set(event.pointerId, event);
    const box = canvas.getBoundingClientRect(), [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
    moved += Math.abs(dx) + Math.abs(dy);
    if (pointers.size === 2) {
      const [a, b] = [...pointers.values()], next = Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
      if (gap) zoom(gap / next, ...spot({ clientX: (a.clientX + b.clientX) / 2, clientY: (a.clientY + b.clientY) / 2 }));
      gap = next;
    } else move((-dx / box.width) * state.view.size, (-dy / box.height) * state.view.size);
  });
  const end = (event) => {
    pointers.delete(event.pointerId);
    gap = 0;
    if (moved >= 4 || event.type !== "pointerup") return;
    const at = Math.floor(state.view.row + spot(event)[1] * state.view.size);
    if (at < n) setToken(state.sort && now.order ? now.order[at] : at, true);
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("keydown", (event) => {
    const step = state.view.size / 8;
    const keys = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: () => zoom(Infinity),
      ArrowLeft: () => move(-step, 0), ArrowRight: () => move(step, 0), ArrowUp: () => move(0, -step), ArrowDown: () => move(0, step) };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  find("#in").addEventListener("click", () => zoom(0.6));
  find("#out").addEventListener("click", () => zoom(1 / 0.6));
  find("#whole").addEventListener("click", () => zoom(Infinity));
}

// ---- one token ----

const spoken = (i) => visible(data.tokens[i]);

function drawWeights() {
  const i = state.token, entries = [];
  for (let e = now.start[i]; e < now.start[i + 1]; e++) entries.push([now.index[e], now.weight[e]]);
  entries.sort((a, b) => b[1] - a[1]);
  const kept = entries.reduce((sum, [, w]) => sum + w, 0);
  const most = entries.length ? entries[0][1] : 1;
  find("#weights").replaceChildren(...entries.map(([to, w]) => (to < n ? tokenItem(to, w, most) : summaryItem(to - n, w, most))));
  find("#dropped").textContent = `Shown are ${plural(entries.length, "weight")} with ${percent(kept)} of the attention of this token. ` +
    `The page keeps at most ${data.kept} per token and head, which is ${percent(layer().heads[state.head].kept)} of this head's attention; smaller weights were left out.`;
  find("#say").textContent = `Token ${whole(i)} “${spoken(i)}”: entropy ${now.entropy[i].toFixed(2)} bits, mean distance ${now.distance[i].toFixed(1)} tokens, ` +
    `${plural(now.degree[i], "key")} with a weight` + (now.sets.length ? `, ${percent(now.mass[i])} through summaries` : "") +
    (now.clusters ? `, cluster ${now.clusters[i]}` : "") + ".";
}

const weightText = (w) => (w < 5e-4 ? w.toExponential(1) : w.toFixed(4));

/** A bar, of which the largest weight of the token fills all, and the weight. */
function valueCells(w, most) {
  return [element("span", { class: "bar-of" }, element("i", { style: `width:${((100 * w) / most).toFixed(1)}%` })), element("span", { class: "value" }, weightText(w))];
}

function tokenItem(to, w, most) {
  const name = element("button", { type: "button", onclick: () => setToken(to, true) }, element("span", { class: "token" }, spoken(to)), ` ${whole(to)}`);
  return element("li", { "data-to": to }, name, ...valueCells(w, most));
}

/** A summary can be opened: its tokens with the largest shares of it. */
function summaryItem(g, w, most) {
  const set = now.sets[g], inside = element("div", { class: "inside" });
  const opening = element("details", {}, element("summary", {}, `summary of ${plural(set.length, "token")}, ${whole(set[0])} – ${whole(set[set.length - 1])}`), inside);
  opening.addEventListener("toggle", () => {
    if (!opening.open || inside.childElementCount) return;
    const shares = Array.from(set, (j, at) => [j, share(now, g, at)]).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
    inside.append(...shares.slice(0, 24).map(([j, p]) => element("span", { "data-member": j }, element("span", { class: "token" }, spoken(j)), ` ${percent(p)}`)));
    if (shares.length > 24) inside.append(element("span", {}, `and ${whole(shares.length - 24)} more`));
    if (!now.shares) inside.append(element("span", {}, "Shares inside were left out: all tokens count the same."));
  });
  return element("li", { class: "summary", "data-summary": g }, opening, ...valueCells(w, most));
}

// ---- the heads ----

function drawHeads() {
  const [, note, show] = METRICS[state.metric], values = data.layers.flatMap((one) => one.heads.map((head) => head[state.metric]));
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const table = element("table", { class: "headmap" });
  const count = Math.max(...data.layers.map((one) => one.heads.length));
  table.append(element("tr", {}, element("th"), ...Array.from({ length: count }, (_, h) => element("th", { scope: "col" }, `head ${h}`))));
  data.layers.forEach((one, l) => table.append(element("tr", {}, element("th", { scope: "row" }, `layer ${one.number}`),
    ...one.heads.map((head, h) => {
      const t = most > least ? (head[state.metric] - least) / (most - least) : 0.5, part = Math.round(8 + 72 * t);
      const button = element("button", { type: "button", "aria-pressed": String(l === state.layer && h === state.head), "data-head": `${l},${h}`,
        style: `background:color-mix(in srgb, var(--accent) ${part}%, var(--card));color:var(--${readable(rgb("accent"), part / 100)})` }, show(head[state.metric]));
      button.addEventListener("click", () => chooseHead(l, h));
      return element("td", {}, button);
    }))));
  find("#headmap").replaceChildren(table);
  find("#metric-note").textContent = note + (data.without.length ? ` Layers of ${[...new Set(data.without)].join(", ")} have no weights and are not shown.` : "");
}

async function chooseHead(l, h) {
  state.layer = Math.max(0, Math.min(data.layers.length - 1, l));
  state.head = Math.max(0, Math.min(layer().heads.length - 1, h));
  const chosen = `${state.layer},${state.head}`, head = await openHead();
  if (chosen !== `${state.layer},${state.head}`) return; // another was chosen while this one was decoded
  now = head;
  if (now.order && !now.rank) { now.rank = new Int32Array(n); now.order.forEach((i, at) => { now.rank[i] = at; }); }
  redraw();
}

// ---- all of it ----

const redrawMap = once(drawMap);
const redraw = once(() => {
  const one = layer();
  find("#layer").selectedIndex = state.layer;
  find("#head").replaceChildren(...one.heads.map((_, h) => element("option", { selected: h === state.head }, String(h))));
  Object.assign(find("#token"), { max: n - 1, value: state.token });
  find("#token-out").textContent = `${whole(state.token)} “${spoken(state.token)}”`;
  find("#chosen").textContent = `${one.name}, ${one.causal ? "causal" : "bidirectional"}`;
  find("#graph").hidden = !now.graph;
  find("#sort").hidden = find("#by-cluster").hidden = !now.clusters;
  find("#graph").setAttribute("aria-pressed", String(state.graph));
  find("#sort").setAttribute("aria-pressed", String(state.sort));
  find("#map-title").textContent = state.graph && now.graph ? `Sampled graph, density ${percent(one.heads[state.head].density)}` : "Queries × keys";
  drawText();
  drawMap();
  drawWeights();
  drawHeads();
  document.documentElement.dataset.ready = "yes";
});

function begin() {
  find("#title").textContent = `What ${data.run} attends to`;
  find("#lead").textContent = `${data.task}, reading ${data.text}: ${plural(n, "token")}.`;
  find("#layer").append(...data.layers.map((one) => element("option", {}, `${one.number} · ${one.name}`)));
  find("#metric").append(...Object.entries(METRICS).map(([key, [label]]) => element("option", { value: key }, label)));
  find("#layer").addEventListener("change", (event) => chooseHead(event.target.selectedIndex, state.head));
  find("#head").addEventListener("change", (event) => chooseHead(state.layer, event.target.selectedIndex));
  find("#metric").addEventListener("change", (event) => { state.metric = event.target.value; drawHeads(); });
  find("#token").addEventListener("input", (event) => setToken(Number(event.target.value), true));
  find("#shade").addEventListener("change", (event) => { state.shade = event.target.value; redraw(); });
  find("#graph").addEventListener("click", () => { state.graph = !state.graph; redraw(); });
  find("#sort").addEventListener("click", () => { state.sort = !state.sort; redraw(); });
  const box = find("#text");
  box.addEventListener("scroll", once(drawText));
  box.addEventListener("click", (event) => { const token = tokenAt(event); if (token != null) setToken(token); });
  box.addEventListener("keydown", (event) => {
    const keys = { ArrowLeft: () => setToken(state.token - 1, true), ArrowRight: () => setToken(state.token + 1, true),
      ArrowUp: () => moveLines(-1), ArrowDown: () => moveLines(1), PageUp: () => moveLines(-10), PageDown: () => moveLines(10),
      Home: () => setToken(0, true), End: () => setToken(n - 1, true) };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  document.addEventListener("keydown", (event) => {
    const keys = { "[": [0, -1], "]": [0, 1], "{": [-1, 0], "}": [1, 0] };
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) chooseHead(state.layer + keys[event.key][0], state.head + keys[event.key][1]);
  });
  setUpMap();
  window.addEventListener("resize", once(() => { layOut(); redraw(); }));
  setUpTheme(redraw);
  layOut();
  chooseHead(0, 0).then(() => setToken(state.token, true)).catch(complainInPage);
}

begin();
