"use strict";
// What the page is drawn from: elements, tables whose rows stay, and lanes.
// Everything is built from nodes and text, never from markup: names are what users of the coordinator choose.

const SVG = "http://www.w3.org/2000/svg";
const LANE = { width: 240, height: 28, seconds: 60 };

function element(name, attributes, text, made = document.createElement(name)) {
  for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, printable(value));
  if (text !== undefined) made.textContent = printable(text);
  return made;
}

function drawn(name, attributes) {
  return element(name, attributes, undefined, document.createElementNS(SVG, name));
}

// What did not change is left alone: a selection stays, and a screen reader has nothing to say again.
function setText(node, text) {
  const shown = printable(text);
  if (node.textContent !== shown) node.textContent = shown;
}

function setAttribute(node, name, value) {
  const shown = printable(value);
  if (node.getAttribute(name) !== shown) node.setAttribute(name, shown);
}

// What does not print is escaped: in a name, U+202E turns the direction of what follows.
function printable(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (char) => `\\u{${char.codePointAt(0).toString(16)}}`);
}

// --- tables ----------------------------------------------------------------------------------------------------------

// A table with a row for each key. Columns: {name, text(item), value(item) to sort by, number, class(item), cell(item)}.
class Table {
  constructor(table, columns, sortedBy) {
    this.body = table.tBodies[0];
    this.columns = columns;
    this.rows = new Map();
    this.sortedBy = sortedBy;
    this.descending = false;
    this.heads = columns.map((column) => this.head(column));
    table.tHead.rows[0].replaceChildren(...this.heads);
    this.items = [];
  }

  head(column) {
    const attributes = { scope: "col", role: "columnheader", class: column.number ? "n" : "" };
    if (column.value === undefined) return element("th", attributes, column.name);
    const head = element("th", attributes);
    const button = element("button", { type: "button" }, column.name);
    button.addEventListener("click", () => {
      this.descending = this.sortedBy === column.name ? !this.descending : Boolean(column.number);
      this.sortedBy = column.name;
      this.show(this.items);
    });
    head.append(button);
    return head;
  }

  show(items) {
    this.items = items;
    const { value } = this.columns.find((column) => column.name === this.sortedBy);
    const sign = this.descending ? -1 : 1;
    const sorted = [...items].sort((a, b) => sign * compare(value(a), value(b)) || compare(a.key, b.key));
    const keys = new Set(items.map((item) => item.key));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    sorted.forEach((item, index) => {
      const row = this.row(item);
      if (this.body.rows[index] !== row) this.body.insertBefore(row, this.body.rows[index] ?? null);
    });
    this.heads.forEach((head, index) => {
      const isSorted = this.columns[index].name === this.sortedBy;
      if (this.columns[index].value) setAttribute(head, "aria-sort", isSorted ? (this.descending ? "descending" : "ascending") : "none");
    });
  }

  row(item) {
    let row = this.rows.get(item.key);
    if (row === undefined) {
      row = element("tr", { role: "row" });
      row.append(...this.columns.map((column, index) => element(index ? "td" : "th", {
        role: index ? "cell" : "rowheader", "data-label": column.name, ...(index ? {} : { scope: "row" }),
      })));
      this.rows.set(item.key, row);
    }
    this.columns.forEach((column, index) => {
      const cell = row.cells[index];
      if (column.cell) column.cell(item, cell);
      else setText(cell, column.text(item));
      if (index === 0) setAttribute(cell, "title", column.text(item)); // it may be too long for its cell
      setAttribute(cell, "class", `${column.number ? "n " : ""}${column.class?.(item) ?? ""}`.trim());
    });
    return row;
  }
}

function compare(a, b) {
  if (typeof a === "string" && typeof b === "string") return a.localeCompare(b, "en", { numeric: true });
  return a < b ? -1 : a > b ? 1 : 0;
}

// --- lanes -----------------------------------------------------------------------------------------------------------

// Generations over the last minute: what was recorded above, what is known complete below, and between them what is
// unconfirmed. To the left the generations at its edges, below it the time.
function drawLane(cell, points, now, state) {
  const { width, height, seconds } = LANE;
  let box = cell.firstChild;
  if (box === null) {
    const made = drawn("svg", { class: "lane", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
    const ticks = [1, 2, 3].map((quarter) => `M${(quarter * width) / 4} 0V${height}`).join("");
    made.append(drawn("path", { class: "ticks", d: ticks }));
    made.append(drawn("path", { class: "unconfirmed" }), drawn("path", { class: "made" }), drawn("path", { class: "done" }));
    const heights = element("div", { class: "heights", "aria-hidden": "true" }), times = element("div", { class: "times", "aria-hidden": "true" });
    heights.append(element("span"), element("span"));
    times.append(element("span", {}, `${seconds} s ago`), element("span", {}, `${seconds / 2} s`), element("span", {}, "now"));
    box = element("div", { class: "plot" });
    box.append(heights, made, times);
    cell.append(box);
  }
  const [heights, picture] = box.children;
  const low = points.length ? points[0][2] : 0;
  const high = Math.max(points.length ? points[points.length - 1][1] : 0, low + 1);
  const x = (t) => Math.max(0, (1 - (now - t) / seconds) * width).toFixed(1);
  const y = (value) => (height - 2 - ((value - low) / (high - low)) * (height - 4)).toFixed(1);
  const steps = (at) => points.map((point, index) => (index ? `H${x(point[0])}V${y(point[at])}` : `M${x(point[0])} ${y(point[at])}`)).join("");
  const back = points.map((point, index) => [point, index]).reverse().map(([point, index]) => `V${y(point[2])}H${x(points[Math.max(index - 1, 0)][0])}`);
  const [, unconfirmed, made, done] = picture.children;
  setText(heights.firstChild, short(high));
  setText(heights.lastChild, short(low));
  setAttribute(unconfirmed, "d", points.length > 1 ? `${steps(1)}${back.join("")}Z` : "");
  setAttribute(made, "d", steps(1));
  setAttribute(done, "d", steps(2));
  setAttribute(picture, "class", `lane ${state}`);
  const first = points.length ? points[0][1] : 0, last = points.length ? points[points.length - 1] : [0, 0, 0];
  setAttribute(picture, "aria-label", `generation ${first} to ${last[1]} within the last minute, ${last[1] - last[2]} unconfirmed`);
}

const short = ((format) => (count) => format.format(count))(new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }));
