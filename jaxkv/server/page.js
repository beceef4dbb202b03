"use strict";
// Asks /pool a few times a second and draws one cell a block. Nothing but text nodes is made of what comes back.

const STATES = ["free", "private", "shared", "cached"];
const EVERY = 400; // milliseconds
const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem("jaxkv-key") || "";

function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  parent.append(made);
  return made;
}

function color(state) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + state).trim();
}

/** Columns, and the side of a cell in pixels, such that `count` cells fill a width but are no taller than `height`. */
function layout(count, width, height) {
  let side = Math.min(22, Math.floor(Math.sqrt((width * height) / Math.max(count, 1))));
  while (side > 1 && Math.ceil(count / Math.max(1, Math.floor(width / side))) * side > height) side -= 1;
  side = Math.max(side, 1);
  return { side, columns: Math.max(1, Math.floor(width / side)) };
}

function drawPool(view) {
  const canvas = byId("pool");
  const count = STATES.reduce((sum, state) => sum + view.counts[state], 0);
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth * scale;
  const { side, columns } = layout(count, width, Math.min(innerHeight * 0.5, 420) * scale);
  canvas.width = width;
  canvas.height = Math.ceil(count / columns) * side;
  canvas.style.height = canvas.height / scale + "px";
  const pen = canvas.getContext("2d");
  const gap = side > 4 ? Math.max(1, Math.round(side / 10)) : 0;
  let at = 0;
  for (const [state, run] of view.blocks) {
    pen.fillStyle = color(state);
    for (const end = at + run; at < end; at += 1) {
      pen.fillRect((at % columns) * side, Math.floor(at / columns) * side, side - gap, side - gap);
    }
  }
  const said = STATES.map((state) => view.counts[state] + " " + state).join(", ");
  canvas.setAttribute("aria-label", count + " blocks: " + said);
}

function drawLegend(view) {
  const list = byId("legend");
  list.replaceChildren();
  for (const state of STATES) {
    const item = element("li", "", list);
    element("i", "", item).style.background = color(state);
    item.append(view.counts[state] + " " + state);
  }
}

function number(value, unit) {
  return value === null ? "–" : value + unit;
}

function drawNumbers(view) {
  const list = byId("numbers");
  list.replaceChildren();
  const speed = view.speed;
  const shown = [
    [number(speed.tokens_per_second, ""), "tokens/s"],
    [number(speed.first_token_ms_p50, " ms"), "first token, median"],
    [number(speed.first_token_ms_p95, " ms"), "first token, 95 %"],
    [number(speed.between_tokens_ms_p50, " ms"), "between tokens, median"],
    [number(speed.between_tokens_ms_p95, " ms"), "between tokens, 95 %"],
    [view.blocks_returned, "blocks returned so far"],
    [view.requests.length + " of " + view.rows, "rows at work"],
    [view.waiting, "waiting"],
  ];
  for (const [value, label] of shown) {
    const item = element("li", "", list);
    element("b", value, item);
    item.append(label);
  }
}

function drawRequests(view) {
  const body = byId("requests");
  body.replaceChildren();
  for (const one of view.requests) {
    const row = element("tr", "", body);
    const name = one.id.slice(0, 17) + (one.choice ? " #" + one.choice : "");
    const tokens = one.prompt_tokens + " + " + one.generated_tokens;
    const cells = [name, one.state, tokens, one.blocks_held, one.blocks_returned, one.tokens_evicted, one.seconds];
    for (const cell of cells) element("td", cell, row);
  }
}

function draw(view) {
  const method = view.method === "none" ? "every token is kept" : view.method + ", budget " + view.budget;
  byId("title").textContent = view.model;
  byId("state").textContent = method + "; blocks of " + view.block_size + " tokens";
  drawPool(view);
  drawLegend(view);
  drawNumbers(view);
  drawRequests(view);
}

async function look() {
  const headers = key ? { Authorization: "Bearer " + key } : {};
  const answer = await fetch("/pool", { headers, cache: "no-store" });
  byId("login").hidden = answer.status !== 401;
  if (answer.status === 401) {
    byId("state").textContent = key ? "this key is wrong" : "this server asks for its API key";
    return false;
  }
  if (!answer.ok) throw new Error("status " + answer.status);
  draw(await answer.json());
  return true;
}

async function watch() {
  for (;;) {
    let seen = true;
    if (!document.hidden) {
      try {
        seen = await look();
      } catch {
        byId("state").textContent = "the server does not answer";
      }
    }
    if (!seen) return; // until a key is given
    await new Promise((done) => setTimeout(done, EVERY));
  }
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem("jaxkv-key", key);
  watch();
});
watch();
