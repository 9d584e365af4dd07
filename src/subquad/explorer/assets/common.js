"use strict";
/* What both parts of the explorer share: elements, numbers, colours, and blobs of bytes. */

const find = (selector, root = document) => root.querySelector(selector);

/** An element with attributes and children. Texts become text nodes: nothing that is shown is ever read as HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** The chunks of a blob: base64, deflated; the number of chunks, their lengths, the chunks. */
async function openBlob(text) {
  const binary = atob(text);
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const whole = await new Response(stream).arrayBuffer();
  const numbers = new DataView(whole);
  const count = numbers.getUint32(0, true);
  const chunks = [];
  let at = 4 + 4 * count;
  for (let i = 0; i < count; i++) {
    const length = numbers.getUint32(4 + 4 * i, true);
    chunks.push(new Uint8Array(whole, at, length));
    at += length;
  }
  return chunks;
}

const parseChunk = (chunk) => JSON.parse(new TextDecoder().decode(chunk));

/** start, count, step, … → the members of a set. */
function membersOf(progressions) {
  const members = [];
  for (let i = 0; i < progressions.length; i += 3) {
    for (let c = 0; c < progressions[i + 1]; c++) members.push(progressions[i] + c * progressions[i + 2]);
  }
  return members;
}

// ---- numbers for people ----

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 2 : 1) + " %";

function short(value, units = ["", " k", " M", " G", " T", " P", " E"], step = 1000) {
  let unit = 0;
  while (value >= step && unit < units.length - 1) [value, unit] = [value / step, unit + 1];
  return (value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toPrecision(3)) + units[unit];
}

const bytes = (value) => short(value, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"], 1024);
const plural = (count, word, words = word + "s") => `${whole(count)} ${count === 1 ? word : words}`;

// ---- canvas ----

/** Size a canvas for its place on the screen; returns its context, in CSS pixels. */
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function rgb(name) {
  const hex = colour(name);
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

const luminance = (paint) => [0.2126, 0.7152, 0.0722].reduce((sum, part, c) => sum + part * (paint[c] / 255) ** 2.2, 0);

/** "ink" or "paper": what can be read better on paper that is painted over with so much of a colour. */
function readable(paint, alpha) {
  const [ink, paper] = [rgb("ink"), rgb("paper")];
  const back = luminance(paper.map((c, i) => c + (paint[i] - c) * alpha));
  const contrast = (other) => (Math.max(back, other) + 0.05) / (Math.min(back, other) + 0.05);
  return contrast(luminance(ink)) >= contrast(luminance(paper)) ? "ink" : "paper";
}

/** Work that may be asked for many times before the next frame is done once. */
function once(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; work(); });
  };
}

function setUpTheme(redraw) {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  find("#theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);
}

function complainInPage(error) {
  const line = element("p", { class: "error", role: "alert" }, `This page could not be drawn: ${error.message || error}`);
  document.body.prepend(line);
  throw error;
}
