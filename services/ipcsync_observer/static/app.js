"use strict";
// Shows /api/stream: a state a second, the first with every event's lane, the others with what is new.
// Everything is built from nodes and text, never from markup: names are what users of the coordinator choose.

const SVG = "http://www.w3.org/2000/svg";
const LANE = { width: 240, height: 28, seconds: 60 };
const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const lanes = new Map();
const view = { state: null, source: null, timer: 0 };

function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const ago = (value) => (value === null ? "–" : `${seconds(value)} ago`);
const process = (pid, bytes) => `pid ${pid ?? "–"}, ${whole.format(Math.round((bytes ?? 0) / 1e6))} MB`;
const sum = (counts) => Object.values(counts ?? {}).reduce((total, count) => total + count, 0);

function element(name, attributes, text, made = document.createElement(name)) {
  for (const [key, value] of Object.entries(attributes ?? {})) made.setAttribute(key, printable(value));
  if (text !== undefined) made.textContent = printable(text);
  return made;
}

const drawn = (name, attributes) => element(name, attributes, undefined, document.createElementNS(SVG, name));

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
    this.body = element("tbody", { role: "rowgroup" });
    this.columns = columns;
    this.rows = new Map();
    this.sortedBy = sortedBy;
    this.descending = false;
    this.heads = columns.map((column) => this.head(column));
    const head = element("thead", { role: "rowgroup" }), row = element("tr", { role: "row" });
    row.append(...this.heads);
    head.append(row);
    table.append(head, this.body);
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
  setText(heights.firstChild, compact.format(high));
  setText(heights.lastChild, compact.format(low));
  setAttribute(unconfirmed, "d", points.length > 1 ? `${steps(1)}${back.join("")}Z` : "");
  setAttribute(made, "d", steps(1));
  setAttribute(done, "d", steps(2));
  setAttribute(picture, "class", `lane ${state}`);
  const first = points.length ? points[0][1] : 0, last = points.length ? points[points.length - 1] : [0, 0, 0];
  setAttribute(picture, "aria-label", `generation ${first} to ${last[1]} within the last minute, ${last[1] - last[2]} unconfirmed`);
}

// --- the tables ------------------------------------------------------------------------------------------------------

const column = (name, of, more) => ({ name, text: of, value: of, ...more });
const number = (name, of, text) => ({ name, number: true, text: (item) => text(of(item)), value: (item) => of(item) ?? -1 });
const age = (name, of, text, most) => ({ ...number(name, of, text), class: (item) => (of(item) > most ? "old" : "") });

const events = new Table(byId("events"), [
  column("name", (event) => event.name, { text: (event) => event.label }),
  column("state", (event) => event.state, { class: (event) => event.state }),
  column("ended", (event) => event.ended_s ?? -1, { text: (event) => (event.ended_s === null ? "–" : `${event.cause || event.state} ${ago(event.ended_s)}`) }),
  column("engine", (event) => event.engine),
  number("recorded", (event) => event.generation, whole.format),
  number("known complete", (event) => event.completed, whole.format),
  number("records/s", (event) => event.rate, (rate) => (rate === null ? "–" : rate.toFixed(1))),
  age("unconfirmed for", (event) => event.pending_s, (value) => (value ? seconds(value) : "–"), 5),
  column("last recorder", (event) => event.node || event.recorder, { text: (event) => (event.node ? `on ${event.node}` : event.recorder || "–") }),
  number("attached", (event) => event.attached, String),
  { name: "last minute", class: () => "wide", cell: (event, cell) => drawLane(cell, lanes.get(event.key) ?? [], view.state.at, event.state) },
], "name");

const sessions = new Table(byId("sessions"), [
  column("name", (session) => session.name, { text: (session) => session.name || "–" }),
  column("id", (session) => session.id),
  number("pid", (session) => session.pid, String),
  number("events", (session) => session.events, String),
  number("connected for", (session) => session.connected_s, seconds),
  age("last seen", (session) => session.last_seen_s, ago, 3),
], "name");

const nodes = new Table(byId("nodes"), [
  column("node", (node) => node.name),
  column("state", (node) => node.state, {
    text: (node) => (node.reason ? `lost: ${node.reason}` : node.state), class: (node) => (node.state === "lost" ? "broken" : "open"),
  }),
  number("waited for here", (node) => node.mirrored, whole.format),
  number("waits for", (node) => node.followed, whole.format),
  number("pending news", (node) => node.pending, whole.format),
  { ...age("last heard", (node) => node.last_heard_s, ago, 3), value: (node) => node.last_heard_s ?? 1e9 },
], "node");

// --- what is known ---------------------------------------------------------------------------------------------------

function keepLanes(state) {
  const known = new Set();
  for (const event of state.events) {
    event.key = `${state.epoch}/${event.slot}/${event.incarnation}`;
    known.add(event.key);
    const points = event.lane ?? lanes.get(event.key) ?? [];
    if (!points.length || points[points.length - 1][0] < state.at) points.push([state.at, event.generation, event.completed]);
    while (points.length && points[0][0] < state.at - LANE.seconds) points.shift();
    lanes.set(event.key, points);
  }
  for (const key of lanes.keys()) if (!known.has(key)) lanes.delete(key);
  for (const session of state.sessions) session.key = session.id;
  for (const node of state.bridge?.peers ?? []) node.key = node.name;
}

// --- what is shown ---------------------------------------------------------------------------------------------------

function say(text, isGood) {
  setText(byId("status"), text);
  setAttribute(byId("status"), "class", isGood ? "good" : "bad");
  setAttribute(byId("main"), "class", isGood ? "" : "stale");
}

function showFigures(state) {
  const { stats } = state;
  const shown = [
    ["version", stats.version ?? "–"], ["driver", stats.driver ?? "–"], ["default TTL", seconds(stats.lease_ttl_s ?? 0)],
    ["sessions", `${whole.format(state.sessions_total)} of ${whole.format(stats.max_sessions ?? 0)}`], ["events open", whole.format(stats.events ?? 0)],
    ["pool in use", `${whole.format(stats.pool_in_use ?? 0)} of ${whole.format(stats.pool_size ?? 0)}`],
    ["pool high-water", whole.format(stats.pool_high_water ?? 0)], ["quarantined", whole.format(stats.quarantined ?? 0)],
    ["deaths", whole.format(sum(stats.deaths))], ["refusals", whole.format(sum(stats.refusals))],
    ["requests", whole.format(sum(stats.requests))], ["up for", seconds(stats.uptime_s ?? 0)],
    ["starts", `${whole.format(stats.starts ?? 1)}, the last ${seconds(stats.start_s ?? 0)} ago`],
    ["last gap", seconds(stats.pause_s ?? 0)], ["coordinator", process(stats.pid, stats.memory_bytes)],
    ["keeper", stats.keeper_pid === stats.pid ? "none" : process(stats.keeper_pid, stats.keeper_memory_bytes)],
  ];
  const list = byId("figures");
  if (!list.children.length) {
    list.append(...shown.map(([name]) => {
      const box = element("div");
      box.append(element("dt", {}, name), element("dd"));
      return box;
    }));
  }
  shown.forEach(([, value], index) => setText(list.children[index].lastChild, value));
}

// A list item for each use of an event.
function showLinks(state) {
  const labels = new Map(state.events.map((event) => [`${event.slot}/${event.incarnation}`, event.label]));
  const texts = state.links.map((link) => {
    const event = labels.get(`${link.slot}/${link.incarnation}`);
    return `${link.session} ${link.role} on ${event}${link.state === "draining" ? " (closed it, work still in flight)" : ""}`;
  });
  const more = state.events.reduce((total, event) => total + event.attached, 0) - texts.length;
  if (more > 0) texts.push(`${whole.format(more)} more are not shown.`);
  const list = byId("links"), shown = texts.length ? texts : ["No session is attached to an event."];
  while (list.children.length > shown.length) list.lastChild.remove();
  while (list.children.length < shown.length) list.append(element("li"));
  shown.forEach((text, index) => setText(list.children[index], text));
}

function showNodes({ bridge }) {
  byId("fleet").hidden = bridge === null;
  if (bridge === null) return;
  const { counts } = bridge;
  setText(byId("bridge"), `This is ${bridge.node} of the fleet ${bridge.fleet}, ${bridge.server ? `by ${bridge.server}` : "cut off from NATS"}: `
    + `${whole.format(bridge.mirrors)} events mirrored, ${whole.format(bridge.exports)} exported, ${whole.format(counts.news_sent)} news sent, `
    + `${whole.format(counts.news_received)} received, ${whole.format(counts.resyncs)} asked for again, ${whole.format(counts.pings_lost)} pings lost.`);
  nodes.show(bridge.peers);
}

function show() {
  const { state } = view;
  if (state === null || document.hidden) return;
  say(state.ready ? `live: ${state.endpoint}` : state.lost ?? `not ready: ${state.problem}`, state.ready);
  document.title = state.ready ? `ipcsync: ${state.events_total} events` : "ipcsync: not ready";
  showFigures(state);
  events.show(state.events);
  const hidden = state.events_found - state.events.length;
  setText(byId("more"), !state.events.length
    ? (state.events_total ? "No event that the coordinator lists has such a name." : "There are no events.")
    : hidden > 0 ? `${hidden} more are not shown: narrow the names.` : "");
  showLinks(state);
  showNodes(state);
  sessions.show(state.sessions);
  const more = state.sessions_total - state.sessions.length;
  setText(byId("more-sessions"), more > 0 ? `${more} more are not shown.` : state.sessions_total ? "" : "There are no sessions.");
}

// --- live ------------------------------------------------------------------------------------------------------------

function lose() {
  const lost = "the observer does not answer; trying again";
  if (view.state !== null) Object.assign(view.state, { ready: false, lost });
  say(lost, false);
}

function connect() {
  view.source?.close();
  view.source = new EventSource(`/api/stream?contains=${encodeURIComponent(byId("filter").value)}`);
  view.source.onmessage = (message) => {
    view.state = JSON.parse(message.data);
    clearTimeout(view.timer); // a network that is cut says nothing
    view.timer = setTimeout(() => { lose(); connect(); }, 3000 * (view.state.period_s + 1));
    keepLanes(view.state);
    show();
  };
  view.source.onerror = () => {
    lose();
    if (view.source.readyState === EventSource.CLOSED) setTimeout(connect, 2000);
  };
}

let typed = 0;
byId("filter").addEventListener("input", () => {
  clearTimeout(typed);
  typed = setTimeout(connect, 250);
});
document.addEventListener("visibilitychange", show);
connect();
