"use strict";
// Shows /api/stream: a state a second, the first with every event's lane, the others with what is new.

const byId = (id) => document.getElementById(id);
const whole = new Intl.NumberFormat("en");
const lanes = new Map();
const view = { state: null, source: null };

function seconds(value) {
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

function process(pid, bytes) {
  return `pid ${pid ?? "–"}, ${whole.format(Math.round((bytes ?? 0) / 1e6))} MB`;
}

function sum(counts) {
  return Object.values(counts ?? {}).reduce((total, count) => total + count, 0);
}

const events = new Table(byId("events"), [
  { name: "name", text: (event) => event.label, value: (event) => event.name },
  { name: "state", text: (event) => event.state, value: (event) => event.state, class: (event) => event.state },
  { name: "ended", text: (event) => (event.ended_s === null ? "–" : `${event.cause || event.state} ${seconds(event.ended_s)} ago`), value: (event) => event.ended_s ?? -1 },
  { name: "engine", text: (event) => event.engine, value: (event) => event.engine },
  { name: "recorded", number: true, text: (event) => whole.format(event.generation), value: (event) => event.generation },
  { name: "known complete", number: true, text: (event) => whole.format(event.completed), value: (event) => event.completed },
  { name: "records/s", number: true, text: (event) => (event.rate === null ? "–" : event.rate.toFixed(1)), value: (event) => event.rate ?? -1 },
  {
    name: "unconfirmed for", number: true, text: (event) => (event.pending_s ? seconds(event.pending_s) : "–"),
    value: (event) => event.pending_s, class: (event) => (event.pending_s > 5 ? "old" : ""),
  },
  { name: "last recorder", text: (event) => (event.node ? `on ${event.node}` : event.recorder || "–"), value: (event) => event.node || event.recorder },
  { name: "attached", number: true, text: (event) => String(event.attached), value: (event) => event.attached },
  { name: "last minute", class: () => "wide", cell: (event, cell) => drawLane(cell, lanes.get(event.key) ?? [], view.state.at, event.state) },
], "name");

const sessions = new Table(byId("sessions"), [
  { name: "name", text: (session) => session.name || "–", value: (session) => session.name },
  { name: "id", text: (session) => session.id, value: (session) => session.id },
  { name: "pid", number: true, text: (session) => String(session.pid), value: (session) => session.pid },
  { name: "events", number: true, text: (session) => String(session.events), value: (session) => session.events },
  { name: "connected for", number: true, text: (session) => seconds(session.connected_s), value: (session) => session.connected_s },
  {
    name: "last seen", number: true, text: (session) => `${seconds(session.last_seen_s)} ago`,
    value: (session) => session.last_seen_s, class: (session) => (session.last_seen_s > 3 ? "old" : ""),
  },
], "name");

const nodes = new Table(byId("nodes"), [
  { name: "node", text: (node) => node.name, value: (node) => node.name },
  { name: "state", text: (node) => node.reason ? `lost: ${node.reason}` : node.state, value: (node) => node.state, class: (node) => (node.state === "lost" ? "broken" : "open") },
  { name: "waited for here", number: true, text: (node) => whole.format(node.mirrored), value: (node) => node.mirrored },
  { name: "waits for", number: true, text: (node) => whole.format(node.followed), value: (node) => node.followed },
  { name: "pending news", number: true, text: (node) => whole.format(node.pending), value: (node) => node.pending },
  {
    name: "last heard", number: true, text: (node) => (node.last_heard_s === null ? "–" : `${seconds(node.last_heard_s)} ago`),
    value: (node) => node.last_heard_s ?? 1e9, class: (node) => (node.last_heard_s > 3 ? "old" : ""),
  },
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
  say(state.ready ? `live: ${state.endpoint}` : `not ready: ${state.problem}`, state.ready);
  document.title = state.ready ? `ipcsync: ${state.events_total} events` : "ipcsync: not ready";
  showFigures(state);
  events.show(state.events);
  const hidden = state.events_found - state.events.length;
  setText(byId("more"), !state.events.length
    ? (state.events_total ? "No event has such a name." : "There are no events.")
    : hidden ? `${hidden} more are not shown, none of them broken or stuck for longer than these: narrow the names.` : "");
  showLinks(state);
  showNodes(state);
  sessions.show(state.sessions);
  const more = state.sessions_total - state.sessions.length;
  setText(byId("more-sessions"), more ? `${more} more are not shown.` : state.sessions_total ? "" : "There are no sessions.");
}

// --- live ------------------------------------------------------------------------------------------------------------

function connect() {
  view.source?.close();
  view.source = new EventSource(`/api/stream?contains=${encodeURIComponent(byId("filter").value)}`);
  view.source.onmessage = (message) => {
    view.state = JSON.parse(message.data);
    keepLanes(view.state);
    show();
  };
  view.source.onerror = () => {
    say("the observer does not answer; trying again", false);
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
