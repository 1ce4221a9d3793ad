"use strict";
(() => {
  const pristine = document.documentElement.outerHTML; // before anything is drawn: what is saved, with the data in it
  const $ = (id) => document.getElementById(id);
  const WINDOW = 10, MOST_POINTS = 1200, MOST_EVENTS = 500, MOST_COLOURS = 8, MOST_EDGES = 300;
  // of a worker's pace, and of a way to another host: see Pace and Way in watching/history.py
  const ID = 0, OPERATIONS = 1, WAITED = 2, COST = 3, STALENESS = 4, CPU = 5, MEMORY = 6, STEP = 7, VALUES = 8, PID = 9;
  const BYTES = [0, 1], ROUND_TRIP = 2, BEHIND = 3, BUSY = [4, 5]; // there and back
  const state = { now: null, slowest: null, verdict: "", points: [], events: [], network: "", lost: "", sort: "id", down: false, seen: [] };

  // -- numbers and words
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
  const number = (value) => (value == null || !isFinite(value) ? "" : value && Math.abs(value) < 1e-3 ? value.toExponential(1) : plain.format(value));
  const percent = (value) => (value == null ? "" : `${Math.round(100 * value)}%`);
  const share = (value) => (value == null ? "" : value < 0.1 ? `${Number((100 * value).toPrecision(2))}%` : percent(value));
  const delay = (value) => (value == null ? "" : value < 1 ? `${Number((1e3 * value).toPrecision(2))} ms` : `${Number(value.toPrecision(2))} s`);
  const bytes = (value) => {
    if (value == null) return "";
    let unit = 0;
    for (; value >= 1000 && unit < 4; unit++) value /= 1000;
    return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${["B", "kB", "MB", "GB", "TB"][unit]}`;
  };
  const duration = (seconds) => {
    if (seconds < 60) return `${seconds.toFixed(1)} s`;
    const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
    return `${h}:${String(m).padStart(2, "0")}:${String(s).padStart(2, "0")}`;
  };
  const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
  const names = (ids) => {
    const runs = [];
    for (const id of [...ids].sort((a, b) => a - b)) {
      const last = runs[runs.length - 1];
      if (last && last[1] === id - 1) last[1] = id; else runs.push([id, id]);
    }
    const words = runs.map(([a, b]) => (a === b ? a : b === a + 1 ? `${a}, ${b}` : `${a} to ${b}`)).join(", ");
    return `worker${ids.length > 1 ? "s" : ""} ${words}`;
  };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // -- elements: made once, then only changed
  const make = (tag, attributes = {}, text) => {
    const element = /^(g|circle|line|text)$/.test(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const say = (element, text) => { if (element.textContent !== String(text)) element.textContent = text; };
  const mark = (element, name, on) => { if (element.classList.contains(name) !== on) element.classList.toggle(name, on); };
  const resize = (parent, count, create) => {
    while (parent.children.length > count) parent.lastElementChild.remove();
    while (parent.children.length < count) parent.append(create(parent.children.length));
  };
  const rows = (body, texts, heads = 1) => {
    resize(body, texts.length, () => make("tr"));
    texts.forEach((cells, i) => {
      const row = body.children[i];
      resize(row, cells.length, (k) => make(k < heads ? "th" : "td", k < heads ? { scope: "row" } : {}));
      cells.forEach((text, k) => {
        say(row.children[k], text);
        mark(row.children[k], "number", body.closest("table").tHead.rows[0].children[k].classList.contains("number"));
      });
    });
  };

  // -- what lies between two points
  const paceOf = (point, id) => point && point[1].find((pace) => pace[ID] === id);
  const before = () => { // a point of some ten seconds ago
    const { points } = state;
    for (let i = points.length - 2; i > 0; i--) if (points[points.length - 1][0] - points[i][0] >= WINDOW) return points[i];
    return points.length > 1 ? points[0] : null;
  };
  const rate = (a, b, read) => {
    const [x, y] = [read(a), read(b)];
    return x == null || y == null || b[0] <= a[0] ? null : Math.max(0, y - x) / (b[0] - a[0]);
  };

  const of = (point, host, what) => (point[2][host] || [])[what];
  const busyShare = (a, b, host, way) => {
    const share = a && b[0] - a[0] >= 2 ? rate(a, b, (point) => of(point, host, BUSY[way])) : null; // a moment says nothing
    return share == null ? null : Math.min(1, share);
  };

  // -- workers
  const COLUMNS = [
    ["id", "worker", "", (w) => w.id],
    ["state", "state", "", (w) => w.state],
    ["rate", "steps/s", "number", (w) => number(w.rate)],
    ["share", "waiting", "number", (w) => percent(w.share)],
    ["cost", "costs others", "number", (w) => (w.cost >= 0.005 ? percent(w.cost) : "")],
    ["waiting_for", "waits for", "wait", (w) => w.waiting_for && `${w.needs.length > 3 ? `${w.needs.length} workers, ` : w.needs.length ? `${names(w.needs)}, ` : ""}${duration(w.waiting_seconds)}: ${w.waiting_for}`],
    ["staleness", "stale", "number minor stale", (w) => (w.staleness ? w.staleness.toFixed(1) : "")],
    ["cpu", "processor", "number minor", (w) => percent(w.cpu)],
    ["resident_bytes", "memory", "number minor", (w) => (w.resident_bytes ? bytes(w.resident_bytes) : "")],
    ["step", "logged", "logged", (w) => (w.step == null ? "" : `step ${w.step}: ` + Object.entries(w.values).map(([name, value]) => `${name} ${value == null ? "not finite" : number(value)}`).join(", "))],
  ];
  const head = $("workers").tHead.rows[0];
  for (const [key, text, kind] of COLUMNS) {
    const cell = make("th", { scope: "col", class: kind });
    const button = make("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      state.down = state.sort === key ? !state.down : key !== "id" && key !== "waiting_for" && key !== "state";
      state.sort = key;
      draw();
    });
    cell.append(button);
    head.append(cell);
  }

  const stepping = () => state.now.workers.some((worker) => worker.step != null);
  function drawWorkers() {
    const { now, points } = state;
    const [last, past] = [points[points.length - 1], before()];
    const counted = stepping() ? STEP : OPERATIONS;
    say(head.children[2].firstChild, stepping() ? "steps/s" : "calls/s");
    for (const cell of document.querySelectorAll("th.stale")) {
      say(cell.firstElementChild || cell, now.links.length ? "stale, on its host" : "stale");
      cell.title = `How many pushes of other workers${now.links.length ? " on the same host" : ""} come between two reads`;
    }
    const seen = now.workers.map((worker) => {
      const of = (column) => { // from a point of the same process: it may have come, or begun to log, after the others
        const read = (point) => { const pace = paceOf(point, worker.id); return pace && pace[PID] === worker.pid ? pace[column] : null; };
        const from = past && points.find((point) => point[0] >= past[0] && read(point) != null);
        return from && from !== last ? rate(from, last, read) : null;
      };
      const live = now.workers.filter((one) => now.over || one.state === "alive"), others = Math.max(1, live.length - 1);
      const [share, cost] = [of(WAITED), of(COST)];
      return { ...worker, rate: of(counted), share: share == null ? null : Math.min(1, share), cost: cost == null ? 0 : Math.min(1, cost / others), cpu: of(CPU) };
    });
    const direction = state.down ? -1 : 1;
    const order = (a, b) => {
      const [x, y] = [a[state.sort] ?? -1, b[state.sort] ?? -1];
      return direction * (x < y ? -1 : x > y ? 1 : 0) || a.id - b.id;
    };
    COLUMNS.forEach(([key], i) => head.children[i].setAttribute("aria-sort", key !== state.sort ? "none" : state.down ? "descending" : "ascending"));
    const hosts = [...new Set(seen.map((worker) => worker.host))];
    const table = $("workers");
    while (table.tBodies.length > hosts.length) table.tBodies[table.tBodies.length - 1].remove();
    hosts.forEach((host, h) => {
      const body = table.tBodies[h] || table.appendChild(make("tbody"));
      const mine = seen.filter((worker) => worker.host === host).sort(order);
      const titled = hosts.length > 1 ? 1 : 0;
      resize(body, mine.length + titled, () => make("tr"));
      if (titled) {
        resize(body.rows[0], 1, () => make("th", { class: "host", scope: "rowgroup", colspan: COLUMNS.length }));
        say(body.rows[0].firstChild, host);
      }
      mine.forEach((worker, i) => drawWorker(body.rows[i + titled], worker));
    });
    state.seen = seen;
  }
  function drawWorker(row, worker) {
    if (row.children.length !== COLUMNS.length) {
      row.replaceChildren(...COLUMNS.map(([key, , kind]) => {
        const cell = make(key === "id" ? "th" : "td", { class: kind });
        if (key === "id") { cell.scope = "row"; cell.append(make("span", { class: "swatch", "aria-hidden": "true" }), make("span")); }
        if (key === "share") { const bar = make("span", { class: "bar", "aria-hidden": "true" }); bar.append(make("span")); cell.append(bar, make("span")); }
        return cell;
      }));
    }
    mark(row, "slow", state.slowest !== null && state.slowest.worker === worker.id);
    COLUMNS.forEach(([key, , , text], k) => {
      const cell = row.children[k];
      if (key === "id") { cell.firstChild.style.background = `var(${colourOf(worker.id)})`; say(cell.lastChild, worker.id); cell.title = `process ${worker.pid}`; }
      else if (key === "share") { cell.firstChild.firstChild.style.width = percent(worker.share || 0); say(cell.lastChild, text(worker)); }
      else say(cell, text(worker) ?? "");
      if (key === "state") cell.className = `state-${worker.state}`;
    });
  }

  // -- who waits for whom
  function drawGraph() {
    const workers = state.now.workers, count = workers.length;
    const at = new Map(workers.map(({ id }, i) => {
      const angle = 2 * Math.PI * i / count - Math.PI / 2;
      return [id, count < 2 ? [0, 0] : [90 * Math.cos(angle), 90 * Math.sin(angle)]];
    }));
    const radius = Math.min(14, count < 2 ? 14 : 250 / count);
    const needed = new Set(workers.flatMap((worker) => worker.needs));
    const edges = workers.flatMap(({ id, needs }) => needs.filter((other) => at.has(other) && other !== id).map((other) => [id, other])).slice(0, MOST_EDGES);
    resize($("edges"), edges.length, () => make("line"));
    edges.forEach(([from, to], i) => {
      const [[x1, y1], [x2, y2]] = [at.get(from), at.get(to)], length = Math.hypot(x2 - x1, y2 - y1) || 1;
      const [dx, dy] = [(x2 - x1) / length * (radius + 1), (y2 - y1) / length * (radius + 1)];
      const line = $("edges").children[i];
      Object.entries({ x1: x1 + dx, y1: y1 + dy, x2: x2 - dx, y2: y2 - dy }).forEach(([name, value]) => line.setAttribute(name, value.toFixed(1)));
    });
    resize($("nodes"), count, () => { const node = make("g"); node.append(make("circle"), make("text")); return node; });
    workers.forEach((worker, i) => {
      const node = $("nodes").children[i], [x, y] = at.get(worker.id);
      node.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      node.setAttribute("class", `${worker.state} ${worker.waiting_for ? "waits" : ""} ${needed.has(worker.id) ? "needed" : ""} ${state.slowest && state.slowest.worker === worker.id ? "slowest" : ""}`);
      node.firstChild.setAttribute("r", radius.toFixed(1));
      say(node.lastChild, radius > 5 ? worker.id : "");
    });
    const groups = new Map();
    for (const worker of workers.filter((one) => one.waiting_for)) {
      const key = JSON.stringify([worker.needs, worker.waiting_for]);
      groups.set(key, [...(groups.get(key) || []), worker]);
    }
    const lines = [...groups.values()].slice(0, 8).map((group) => {
      const [{ needs, waiting_for }] = group, longest = Math.max(...group.map((one) => one.waiting_seconds));
      return `${names(group.map((one) => one.id))} wait${group.length > 1 ? "" : "s"}${needs.length ? ` for ${names(needs)}` : ""}: ${waiting_for}, for ${duration(longest)}`;
    });
    const texts = lines.length ? lines : [state.now.over ? "nobody waited at the end" : "nobody waits just now"];
    resize($("graph-text"), texts.length, () => make("li"));
    texts.forEach((text, i) => say($("graph-text").children[i], text));
    const kinds = Object.entries(state.now.waited_for).sort((a, b) => b[1] - a[1]).slice(0, 6);
    $("kinds").hidden = !kinds.length;
    rows($("kinds").tBodies[0], kinds.map(([kind, seconds]) => [kind, seconds.toFixed(1)]));
    $("waiting").hidden = count < 2;
  }

  // -- charts
  const charts = new Map();
  const few = () => state.now.workers.length <= MOST_COLOURS;
  const colourOf = (id) => {
    const place = state.now.workers.findIndex((worker) => worker.id === id);
    return few() ? `--c${place}` : state.slowest && state.slowest.worker === id ? "--c1" : "--many";
  };
  const gauge = (column) => (a, b, id) => { const pace = paceOf(b, id); return pace && pace[column] ? pace[column] : null; };
  const earlier = () => { // for each point, one from which a speed is worth drawing
    const { points } = state;
    if (!points.length) return [];
    const apart = Math.max(2, (points[points.length - 1][0] - points[0][0]) / 150);
    let from = 0;
    return points.map((point, i) => {
      while (from + 1 < i && point[0] - points[from + 1][0] >= apart) from++;
      return from < i ? points[from] : undefined;
    });
  };
  const speed = (column) => (a, b, id) => (a ? rate(a, b, (point) => (paceOf(point, id) || [])[column]) : null);
  function wanted() {
    const found = [], { points, now } = state;
    for (const name of new Set(now.workers.flatMap((worker) => Object.keys(worker.values)))) {
      found.push([`logged ${name}`, name, number, (a, b, id) => { const pace = paceOf(b, id); return pace ? pace[VALUES][name] ?? null : null; }]);
    }
    if (stepping()) found.push(["steps", "steps a second", number, speed(STEP)]);
    found.push(["operations", "adds, gets and exchanges a second", number, speed(OPERATIONS)]);
    if (now.workers.length > 1) found.push(["waited", "share of the time spent waiting", share, (a, b, id) => { const share = speed(WAITED)(a, b, id); return share == null ? null : Math.min(1, share); }]);
    if (now.workers.some((worker) => worker.staleness > 0)) found.push(["staleness", now.links.length ? "staleness: pushes of others on the same host between reads" : "staleness: pushes of others between reads", number, gauge(STALENESS)]);
    found.push(["cpu", "processor time, of one core", share, speed(CPU)], ["memory", "memory", bytes, gauge(MEMORY)]);
    const hosts = now.links.map(({ host }) => host), ways = hosts.flatMap((host) => [[host, 0], [host, 1]]);
    if (hosts.length) {
      found.push(["links", "bytes a second to and from other hosts", bytes, (a, b, [host, way]) => a && rate(a, b, (point) => of(point, host, BYTES[way])), ways]);
      found.push(["busy", "share of the time that a connection is busy", share, (a, b, [host, way]) => busyShare(a, b, host, way), ways]);
      if (now.links.some((link) => link.behind_seconds > 0) || state.points.some((point) => hosts.some((host) => of(point, host, BEHIND) > 0))) found.push(["behind", "staleness: how old other hosts' adds are before reads here see them, at most", delay, (a, b, [host]) => of(b, host, BEHIND) ?? null, hosts.map((host) => [host])]);
      found.push(["delays", "round trip to other hosts", delay, (a, b, [host]) => of(b, host, ROUND_TRIP) ?? null, hosts.map((host) => [host])]);
    }
    const keyed = now.tables.filter((table) => table.kind === "keyed"), counted = (point, name, what) => (point[3][name] || [])[what];
    if (keyed.length) found.push(["rows", "rows of keyed tables", number, (a, b, [name]) => counted(b, name, 0) ?? null, keyed.map(({ name }) => [name])]);
    const copied = keyed.filter((table) => table.copies_used);
    const hits = (a, b, [name]) => {
      const [used, fetched] = [1, 2].map((what) => a && rate(a, b, (point) => counted(point, name, what)));
      return used ? Math.max(0, 1 - fetched / used) : null;
    };
    if (copied.length) found.push(["hits", "reads of other hosts' rows that a copy here has served", percent, hits, copied.map(({ name }) => [name])]);
    return points.length > 1 ? found : [];
  }
  function drawCharts() {
    const list = wanted(), workers = state.now.workers.map((worker) => worker.id);
    for (const [key, chart] of charts) if (!list.some(([wish]) => wish === key)) { chart.plot.destroy(); chart.figure.remove(); charts.delete(key); }
    const times = state.points.map((point) => point[0]), from = earlier();
    const had = charts.size;
    for (const [key, title, format, read, links] of list) {
      const series = links || workers;
      const colours = links ? links.map((_, i) => `--c${i % MOST_COLOURS}`) : workers.map(colourOf);
      const signature = JSON.stringify([series, colours]);
      const data = [times, ...series.map((one) => state.points.map((point, i) => read(from[i], point, one)))];
      let chart = charts.get(key);
      if (chart && chart.signature !== signature) { chart.plot.destroy(); chart.plot = null; }
      if (!chart) {
        const figure = make("figure"), caption = make("figcaption"), place = make("div", { role: "img" });
        caption.append(make("span", {}, title), make("output", { "aria-live": "off" }));
        figure.append(caption, ...(links ? [make("ul", { class: "legend" })] : []), place);
        $("charts").append(figure);
        chart = { figure, place, output: caption.lastChild, plot: null };
        charts.set(key, chart);
      }
      if (links) explain(chart.figure.children[1], links.map((one, i) => [colours[i], wayOf(one)]));
      if (!chart.plot) chart.plot = plotIn(chart, series, colours, format, data, key.startsWith("logged"));
      else chart.plot.setData(data);
      chart.signature = signature;
      const gone = new Set(links || state.now.over ? [] : state.now.workers.filter((worker) => worker.state !== "alive").map((worker) => worker.id));
      const last = series.map((one, i) => (gone.has(one) ? null : data[i + 1][data[i + 1].length - 1])).filter((value) => value != null);
      const lost = key.startsWith("logged") ? state.now.workers.filter((worker) => worker.values[title] === null).map((worker) => worker.id) : [];
      const when = state.now.over ? "at the end" : "now", of = !links ? "workers" : state.now.links.some(({ host }) => host === links[0][0]) ? "hosts" : "tables";
      const none = () => (data.slice(1).some((values) => values.some((value) => value != null)) ? `none ${when}` : "no values yet");
      const range = (last.length ? `${when} ${between(last, format, links && links[0].length > 1 ? (links.length > 2 ? "all ways" : "both ways") : of)}` : none()) + (lost.length ? `; ${names(lost)}: not finite` : "");
      chart.place.setAttribute("aria-label", `Chart by ${of.slice(0, -1)}: ${title}; ${range}${began(data.slice(1), format, of)}`);
      if (!chart.pointed) say(chart.output, range);
    }
    if (charts.size > had) for (const [key] of list) $("charts").append(charts.get(key).figure); // loss first, whenever it came
    const items = few() ? workers.map((id) => [colourOf(id), `worker ${id}`]) : [["--many", `${workers.length} workers`], ...(state.slowest ? [["--c1", `worker ${state.slowest.worker}, the slowest`]] : [])];
    explain($("legend"), items);
  }
  const explain = (list, items) => {
    resize(list, items.length, () => { const item = make("li"); item.append(make("span", { class: "swatch" }), make("span")); return item; });
    items.forEach(([name, text], i) => { const item = list.children[i]; item.firstChild.style.background = `var(${name})`; say(item.lastChild, text); });
  };
  const between = (values, format, over) => {
    const ends = [...new Set([Math.min(...values), Math.max(...values)].map(format))];
    return ends.length > 1 ? `${ends.join(" to ")} over ${over}` : ends[0];
  };
  const began = (columns, format, over) => { // for who cannot see whether it falls
    const first = columns.map((values) => values.find((value) => value != null)).filter((value) => value != null);
    return first.length ? `, at first ${between(first, format, over)}` : "";
  };
  const wayOf = ([host, way]) => (way === undefined ? host : `${way ? "from" : "to"} ${host}`);
  const WIDTH = (chart) => Math.max(200, chart.place.clientWidth), HEIGHT = 170;
  const sizes = new ResizeObserver(() => { for (const chart of charts.values()) if (chart.plot) chart.plot.setSize({ width: WIDTH(chart), height: HEIGHT }); });
  sizes.observe($("charts"));
  function plotIn(chart, series, colours, format, data, fits) {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const name = (one) => (Array.isArray(one) ? wayOf(one) : `${one}`);
    const options = {
      width: WIDTH(chart), height: HEIGHT, legend: { show: false }, cursor: { y: false, points: { show: series.length <= MOST_COLOURS } },
      scales: { y: { range: (plot, low, high) => (fits && low != null && high > low ? [low - (high - low) * 0.05, high + (high - low) * 0.05] : low == null ? [0, 1] : [Math.min(0, low), high > Math.max(0, low) ? high + (high - Math.min(0, low)) * 0.05 : low + 1]) } },
      axes: [{ ...axis, space: 75, size: 30, values: (plot, splits) => splits.map(clock) }, { ...axis, size: 62, values: (plot, splits) => splits.map(format) }],
      series: [{}, ...series.map((one, i) => ({ label: name(one), stroke: colour(colours[i]), width: colours[i] === "--many" ? 0.8 : 1.8, points: { show: false }, spanGaps: false }))],
      hooks: {
        drawClear: [(plot) => { // when workers or hosts were lost
          plot.ctx.fillStyle = colour("--bad");
          for (const event of state.events) if (event.bad && event.at >= plot.scales.x.min) plot.ctx.fillRect(plot.valToPos(event.at, "x", true), plot.bbox.top, 2, plot.bbox.height);
        }],
        setCursor: [(plot) => {
          const i = plot.cursor.idx;
          chart.pointed = i != null && plot.cursor.left >= 0;
          if (!chart.pointed) return;
          const values = series.map((one, k) => [name(one), plot.data[k + 1][i]]).filter(([, value]) => value != null);
          const shown = values.length <= MOST_COLOURS ? values.map(([label, value]) => `${label}: ${format(value)}`).join("  ") : `${format(Math.min(...values.map((v) => v[1])))} to ${format(Math.max(...values.map((v) => v[1])))}`;
          say(chart.output, `${clock(plot.data[0][i])}  ${shown}`);
        }],
      },
    };
    return new uPlot(options, data, chart.place);
  }
  for (const box of document.querySelectorAll(".scroll")) { // where a table goes on beyond an edge
    const look = () => { mark(box, "before", box.scrollLeft > 1); mark(box, "after", box.scrollWidth - box.clientWidth - box.scrollLeft > 1); };
    box.addEventListener("scroll", look, { passive: true });
    const changes = new ResizeObserver(look);
    for (const one of [box, box.firstElementChild]) changes.observe(one);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts.values()) chart.signature = ""; draw(); });

  // -- the rest
  function drawEvents() {
    const list = $("events"), { events } = state;
    const newest = events.length ? events[events.length - 1] : null;
    if (list.newest === newest) return;
    const from = list.newest ? events.indexOf(list.newest) + 1 : 0;
    for (const { at, text, bad } of events.slice(from)) {
      const item = make("li", bad ? { class: "bad" } : {});
      item.append(make("time", { datetime: new Date(1000 * at).toISOString() }, clock(at)), text);
      list.prepend(item);
    }
    while (list.children.length > MOST_EVENTS) list.lastElementChild.remove();
    list.newest = newest;
  }
  function drawTables() {
    const { tables, links, publications = [], up_seconds: up } = state.now, past = before(), last = state.points[state.points.length - 1];
    $("tables").closest("section").hidden = !tables.length;
    const kept = state.past || { at: state.now.at - up, tables: [] };
    const seconds = Math.max(1e-3, state.now.at - kept.at);
    const grown = (table, what) => Math.max(0, table[what] - ((kept.tables.find((one) => one.id === table.id) || {})[what] || 0)) / seconds;
    rows($("tables").tBodies[0], tables.map((table) => [table.name, `${table.shape.join(" x ")} ${table.dtype}${table.kind === "keyed" ? ", by key" : ""}${table.copies_used ? `, ${table.copies} copies` : ""}`, table.updater,
      number(grown(table, "adds") + grown(table, "exchanges")), number(grown(table, "gets") + grown(table, "exchanges")), bytes(grown(table, "bytes")), duration(table.wait_seconds), table.staleness ? table.staleness.toFixed(1) : "",
      grown(table, "copies_used") ? `${(100 * Math.max(0, 1 - grown(table, "copies_fetched") / grown(table, "copies_used"))).toFixed(1)}%` : ""]));
    $("publications").closest("section").hidden = !publications.length;
    rows($("publications").tBodies[0], publications.map((one) => [one.name, one.host || "", one.version, one.step ?? "", one.readers,
      one.oldest_version && one.oldest_version < one.version ? `process ${one.oldest_pid}: version ${one.oldest_version}` : "", one.left_out, one.sent_bytes ? bytes(one.sent_bytes) : "", bytes(one.memory_bytes)]));
    $("links").closest("section").hidden = !links.length;
    const busy = ({ host }) => past && Math.max(...[0, 1].map((way) => busyShare(past, last, host, way)));
    rows($("links").tBodies[0], links.map((link) => [link.host, link.state,
      ...BYTES.map((way) => (past ? bytes(rate(past, last, (point) => of(point, link.host, way))) : "")), percent(busy(link)), delay(link.round_trip_seconds), delay(link.behind_seconds), link.connections > 2 ? `${link.connections - 1} times` : link.connections > 1 ? "once" : ""]));
  }
  const NOBODY = $("verdict").textContent;
  let shown = "";
  function drawVerdict() {
    const { now, slowest, lost, verdict } = state, live = now ? now.workers.filter((worker) => worker.state === "alive") : [];
    const gone = now && !now.over && !lost ? now.workers.filter((worker) => worker.state === "lost").map((worker) => worker.id) : [];
    const said = gone.length ? `W${names(gone).slice(1)} ${gone.length > 1 ? "were" : "was"} lost. ` : "";
    const text = said + (now && now.over ? `The job is over: ${now.over}. ${verdict[0].toUpperCase()}${verdict.slice(1)}.` : lost || (!now || !now.workers.some((worker) => worker.pid) ? NOBODY : slowest ? `W${verdict.slice(1)}.` : live.length > 1 ? "No worker holds the others up." : live.length ? "One worker is running." : "No worker is running."));
    // a reader of the screen is told what is new, not each percent
    const news = now && slowest && !now.over && !lost ? `${said}${slowest.worker} ${Math.round(slowest.share * 10)} ${slowest.share ? "" : Math.round(slowest.pace * 5)}` : text;
    say($("verdict"), text);
    if (news !== shown) say($("said"), text);
    shown = news;
    $("network").hidden = !state.network;
    if (state.network) say($("network"), `${state.network[0].toUpperCase()}${state.network.slice(1)}.`);
    const ended = !now || !now.over ? undefined : now.well == null ? "unknown" : now.well ? "" : "bad";
    $("verdict").className = ended ?? (lost ? "bad" : slowest || gone.length ? "slow" : "");
  }
  function draw() {
    drawVerdict();
    const { now } = state;
    if (!now) return;
    const program = [...new Set(now.workers.map((worker) => worker.program).filter(Boolean))].sort().join(", ") || state.program || "job";
    state.program = program;
    say($("program"), program);
    document.title = `${program} - multiverso`;
    const hosts = new Set(now.workers.map((worker) => worker.host)).size, alive = now.workers.filter((worker) => worker.state === "alive").length;
    say($("facts"), [`${alive} of ${now.workers_num ?? now.workers.length} workers${hosts > 1 ? ` on ${hosts} hosts` : ""}`, `${now.over ? "ran" : "up"} ${duration(now.up_seconds)}`,
      `tables ${bytes(now.memory_bytes)}`, ...(now.checkpoint ? [`checkpoint ${now.checkpoint}`] : []), ...(now.restarts ? [now.restarts > 1 ? `restarted ${now.restarts} times` : "restarted once"] : [])].join(" \u00b7 "));
    drawWorkers();
    drawGraph();
    drawCharts();
    drawEvents();
    drawTables();
  }

  const recent = [];
  function take(message) {
    const { now, slowest, verdict, network, points, events, whole } = message;
    if (whole) { state.points = []; state.events = []; $("events").replaceChildren(); $("events").newest = null; }
    Object.assign(state, { now, slowest, verdict, network, lost: "" });
    state.points.push(...points);
    if (state.points.length > MOST_POINTS) state.points = state.points.filter((_, i) => (state.points.length - 1 - i) % 2 === 0);
    state.events.push(...events);
    state.events.splice(0, state.events.length - MOST_EVENTS);
    if (now) {
      recent.push({ at: now.at, tables: now.tables });
      while (recent.length > 2 && recent[1].at <= now.at - WINDOW) recent.shift();
      state.past = recent.length > 1 ? recent[0] : null;
    }
  }
  const saved = () => {
    const { now, slowest, verdict, network, points, events } = state;
    const data = JSON.stringify({ now, slowest, verdict, network, points, events, whole: true }).replaceAll("<", "\\u003c");
    return `<!doctype html>\n${pristine.replace(/(<script type="application\/json" id="data">)[^<]*/, (_, tag) => tag + data)}`;
  };
  $("save").addEventListener("click", () => {
    const link = make("a", { download: `multiverso-${(state.program || "job").replace(/[^\w.-]+/g, "-")}.html` });
    link.href = URL.createObjectURL(new Blob([saved()], { type: "text/html" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  });

  let due = false;
  const soon = () => { if (!due) { due = true; requestAnimationFrame(() => { due = false; draw(); }); } };
  const data = $("data").textContent.trim();
  if (data) {
    take(JSON.parse(data));
    $("save").hidden = true;
    draw();
  } else {
    const source = new EventSource(`events${location.search}`);
    source.onmessage = ({ data: text }) => {
      take(JSON.parse(text));
      if (state.now && state.now.over) source.close();
      soon();
    };
    source.onerror = () => {
      state.lost = source.readyState === EventSource.CLOSED ? "The page is not served any more." : "The connection to the page's server is lost; trying again.";
      soon();
    };
  }
  window.multiverso = { state, saved };
})();
