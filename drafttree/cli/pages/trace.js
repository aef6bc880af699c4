"use strict";
const trace = JSON.parse(document.getElementById("data").textContent);
const PARTS = ["draft", "forward", "verify", "rest"];
const SHADES = ["#3f7fbf", "#c2651b", "#3f9f7f", "#8e6bbf", "#b8434e", "#7a8a1f", "#b0679a", "#57606a"];
const SVG = "http://www.w3.org/2000/svg";
const at = (id) => document.getElementById(id);
const milliseconds = (seconds) => (1000 * seconds).toFixed(1);
const total = (seconds) => PARTS.reduce((sum, part) => sum + seconds[part], 0);
const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\r/g, "␍").replace(/ /g, "␣");
const shortened = (text, most) => [...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text;
const emitted = (step) => [...step.nodes.slice(1).filter((node) => node.accepted), step.bonus];

function element(parent, name, text, kind) {
  const made = parent.appendChild(document.createElement(name));
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function drawn(parent, name, attributes, text) {
  const made = parent.appendChild(document.createElementNS(SVG, name));
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/* A source without its rank or length, in which all that come from one place are alike. */
const kindOf = (source) => source.replace(/ (rank \d+|of .*)$/, "");
const kinds = [...new Set(trace.steps.flatMap((step) => step.nodes.slice(1).map((node) => kindOf(node.source))))];
const shadeOf = (source) => SHADES[kinds.indexOf(kindOf(source)) % SHADES.length];

/* The step of each token of the answer; the first token comes before all steps. */
const stepOf = [-1];
trace.steps.forEach((step, number) => emitted(step).forEach(() => stepOf.push(number)));
let now = 0;

function showConstant() {
  at("title").textContent = `${trace.method} in ${trace.engine} ${trace.engine_version}`;
  const options = Object.entries(trace.options).map(([key, value]) => `${key}=${value}`);
  at("conditions").textContent = [
    trace.model, trace.dtype, trace.eager ? "eager" : "compiled",
    trace.temperature ? `temperature ${trace.temperature}` : "greedy", `${trace.device}: ${trace.cpu}`, ...options,
  ].join(" · ");
  at("prompt").textContent = trace.prompt.join("\n\n");
  const count = trace.steps.length;
  const tokens = trace.tokens.length;
  at("count").textContent = `${tokens} tokens, the first after a prompt of ${trace.prompt_tokens} tokens read in ` +
    `${milliseconds(total(trace.prompt_seconds))} ms` +
    (count ? `, the others in ${count} steps: ${((tokens - 1) / count).toFixed(2)} a step` : "");
  trace.tokens.forEach((token, place) => {
    const span = element(at("answer"), "span", token.text);
    if (stepOf[place] >= 0) span.onclick = () => go(stepOf[place]);
  });
  for (const part of PARTS) element(at("parts"), "span", part, "key").style.setProperty("--shade", `var(--${part})`);
  for (const kind of kinds) element(at("kinds"), "span", kind, "key").style.setProperty("--shade", shadeOf(kind));
  const longest = Math.max(...trace.steps.map((step) => total(step.seconds)), 1e-9);
  trace.steps.forEach((step, number) => {
    const bar = element(at("times"), "div");
    bar.title = `step ${number + 1}: ${milliseconds(total(step.seconds))} ms, ${emitted(step).length} tokens`;
    bar.style.height = `${(100 * total(step.seconds)) / longest}%`;
    for (const part of PARTS) {
      const piece = element(bar, "div");
      piece.style.flex = `${1e6 * step.seconds[part]} 1 0`;
      piece.style.background = `var(--${part})`;
    }
    bar.onclick = () => go(number);
  });
  for (const row of trace.sources) {
    const line = element(at("sources").tBodies[0], "tr");
    const share = `${(100 * row.share).toFixed(1)}%`;
    for (const cell of [row.source, row.tried, row.hit, share]) element(line, "td", cell);
  }
}

function showTree(step) {
  const svg = at("tree");
  svg.replaceChildren();
  const WIDE = 164, HIGH = 34, GAP = 26;
  const nodes = step.nodes.map((node) => ({ ...node, children: [] }));
  let last = 0;
  nodes.forEach((node, place) => {
    node.kind = node.accepted ? "accepted" : "rejected";
    node.depth = place ? nodes[node.parent].depth + 1 : 0;
    if (place) nodes[node.parent].children.push(node);
    if (node.accepted) last = place;
  });
  const bonus = {
    token: step.bonus.token, text: step.bonus.text, source: "bonus token", kind: "bonus",
    depth: nodes[last].depth + 1, children: [],
  };
  nodes[last].children.unshift(bonus);
  let rows = 0, deepest = 0;
  const place = (node) => {
    deepest = Math.max(deepest, node.depth);
    node.children.forEach(place);
    node.row = node.children.length ? node.children[0].row : rows++;
  };
  place(nodes[0]);
  svg.setAttribute("width", (deepest + 1) * (WIDE + GAP) + 8);
  svg.setAttribute("height", rows * (HIGH + 6) + 8);
  const x = (node) => 4 + node.depth * (WIDE + GAP);
  const y = (node) => 4 + node.row * (HIGH + 6);
  const draw = (node) => {
    for (const child of node.children) {
      const [left, top, right, below] = [x(node) + WIDE, y(node) + HIGH / 2, x(child), y(child) + HIGH / 2];
      const middle = (left + right) / 2;
      const path = `M${left},${top} C${middle},${top} ${middle},${below} ${right},${below}`;
      drawn(svg, "path", { d: path, class: child.kind === "rejected" ? "" : "accepted" });
      draw(child);
    }
    const group = drawn(svg, "g", { class: node.kind, transform: `translate(${x(node)},${y(node)})` });
    drawn(group, "title", {}, `token ${node.token}: ${visible(node.text)} ${node.source}`);
    const shade = node.kind === "bonus" ? {} : { stroke: node.source ? shadeOf(node.source) : "var(--line)" };
    drawn(group, "rect", { width: WIDE, height: HIGH, rx: 5, ...shade });
    drawn(group, "text", { x: 7, y: 15 }, shortened(visible(node.text), 20));
    drawn(group, "text", { x: 7, y: 28, class: "source" }, shortened(node.source || "last token", 27));
  };
  draw(nodes[0]);
}

function show() {
  const count = trace.steps.length;
  at("back").disabled = now <= 0;
  at("on").disabled = now >= count - 1;
  at("number").textContent = count ? `Step ${now + 1} of ${count}` : "No decode steps";
  if (!count) return;
  const step = trace.steps[now];
  const drafted = step.nodes.length - 1;
  const accepted = emitted(step).length - 1;
  const kept = stepOf.slice(0, trace.tokens.length).filter((number) => number === now).length;
  at("outcome").textContent = `${accepted} of ${drafted} draft tokens accepted, and the bonus token ` +
    `${visible(step.bonus.text)}` +
    (kept <= accepted ? `; the answer ends after ${kept} of them` : "");
  at("spent").replaceChildren();
  for (const part of PARTS) {
    const piece = element(at("spent"), "div");
    piece.style.flex = `${1e6 * step.seconds[part]} 1 0`;
    piece.style.background = `var(--${part})`;
  }
  at("milliseconds").textContent = `${milliseconds(total(step.seconds))} ms: ` +
    PARTS.map((part) => `${part} ${milliseconds(step.seconds[part])}`).join(", ");
  [...at("answer").children].forEach((span, place) => {
    const number = stepOf[place];
    const own = number === now && stepOf[place + 1] !== now ? " bonus" : "";
    span.className = number > now ? "later" : number === now ? `now${own}` : "";
  });
  [...at("times").children].forEach((bar, number) => bar.classList.toggle("now", number === now));
  showTree(step);
}

function go(number) {
  now = Math.max(0, Math.min(trace.steps.length - 1, number));
  history.replaceState(null, "", `#${now + 1}`);
  show();
}

const MOVES = {
  ArrowLeft: () => now - 1, ArrowRight: () => now + 1, Home: () => 0, End: () => trace.steps.length - 1,
};
document.addEventListener("keydown", (event) => {
  if (!(event.key in MOVES) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  go(MOVES[event.key]());
});
at("back").onclick = () => go(now - 1);
at("on").onclick = () => go(now + 1);
window.addEventListener("hashchange", () => go((parseInt(location.hash.slice(1), 10) || 1) - 1));
showConstant();
now = Math.max(0, Math.min(trace.steps.length, parseInt(location.hash.slice(1), 10) || 1) - 1);
show();
