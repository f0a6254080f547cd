// The page of the admin port: asks /api/live once a second and draws what it says. No data is made here but differences,
// rates and quantiles, by the formulas of /metrics. Everything that peers name is set as text, never as markup.
// Bounds: an hour of samples, ten seconds of answers for rates, ROWS rows of a table until somebody asks for all.
"use strict";

(() => {
  const ROWS = 10, MOST = 100, WINDOW_MS = 10000, COLOURS = 8, CONNECTIONS_MS = 3000, FINDINGS_MS = 10000, LATE_US = 30e6;
  // Long polls wait on purpose: latencies leave them out, unless their API is chosen.
  const WAITING = new Set(["Fetch", "ShareFetch", "JoinGroup", "SyncGroup", "ConsumerGroupHeartbeat"]);
  const DEFAULTS = { cluster: "", broker: "", api: "", find: "", range: "900", theme: "" };
  const $ = (id) => document.getElementById(id);

  const chosen = { ...DEFAULTS };
  let series = [], groupNames = [], samples = [], current = null, answers = [], slow = [], last = null, lags = [];
  let connections = [], findings = null, names = [], startedMs = 0, paused = false, asking = false, timer = 0, failures = 0;
  const sorted = {}, opened = {};

  // --- figures -------------------------------------------------------------------------------------------------------

  const number = (value) => {
    if (value == null || Number.isNaN(value)) return "–";
    if (value === 0) return "0";
    if (Math.abs(value) < 10) return value.toFixed(value < 0.995 ? 2 : 1);
    if (Math.abs(value) < 10000) return Math.round(value).toLocaleString("en");
    for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) if (value >= size) return (value / size).toPrecision(3) + unit;
    return String(Math.round(value));
  };
  const count = (value) => (value == null ? "–" : value < 1e6 ? Math.round(value).toLocaleString("en") : number(value));
  const bytes = (value) => {
    if (value == null) return "–";
    for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return (value / size).toPrecision(3) + " " + unit;
    return Math.round(value) + " B";
  };
  const duration = (seconds) => {
    if (seconds == null || Number.isNaN(seconds)) return "–";
    if (seconds === 0) return "0";
    if (seconds < 0.001) return Math.round(seconds * 1e6) + " µs";
    if (seconds < 1) return (seconds * 1000).toPrecision(seconds < 0.01 ? 2 : 3).replace(/\.0+$/, "") + " ms";
    if (seconds < 120) return seconds.toPrecision(3) + " s";
    if (seconds < 7200) return Math.round(seconds / 60) + " min";
    return seconds < 172800 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " d";
  };
  const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

  // As histogram_quantile: linear within the bucket.
  const quantile = (counts, q) => {
    const bounds = last.bounds_s;
    let total = 0, below = 0;
    for (const n of counts) total += n;
    if (!total) return null;
    for (let i = 0; i < counts.length; i++) {
      if (counts[i] && below + counts[i] >= q * total) {
        if (i === bounds.length) return bounds[bounds.length - 1];
        const low = i ? bounds[i - 1] : 0;
        return low + ((bounds[i] - low) * (q * total - below)) / counts[i];
      }
      below += counts[i];
    }
    return bounds[bounds.length - 1];
  };
  const buckets = () => new Array(last.bounds_s.length + 1).fill(0);
  const fill = (counts, pairs, sign) => { for (let i = 0; i < pairs.length; i += 2) counts[pairs[i]] += sign * pairs[i + 1]; };

  // --- what is chosen ------------------------------------------------------------------------------------------------

  const matches = (cluster, broker, api) =>
    (!chosen.cluster || cluster === chosen.cluster) && (!chosen.broker || broker === chosen.broker) && (!chosen.api || api === chosen.api);
  const found = (...texts) => !chosen.find || texts.some((text) => String(text ?? "").toLowerCase().includes(chosen.find.toLowerCase()));

  function fromUrl() {
    const query = new URLSearchParams(location.search);
    for (const name of Object.keys(DEFAULTS)) chosen[name] = query.get(name) ?? DEFAULTS[name];
    if (!["300", "900", "3600"].includes(chosen.range)) chosen.range = DEFAULTS.range;
    if (!["light", "dark"].includes(chosen.theme)) chosen.theme = "";
    shown();
  }
  function choose(change) {
    Object.assign(chosen, change);
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(chosen)) if (value !== DEFAULTS[name]) query.set(name, value);
    history.replaceState(null, "", query.size ? "?" + query : location.pathname);
    shown();
  }
  function shown() {
    if (chosen.theme) document.documentElement.dataset.theme = chosen.theme;
    else delete document.documentElement.dataset.theme;
    for (const name of Object.keys(DEFAULTS)) {
      const field = $("filters").elements[name];
      if (document.activeElement === field && name === "find") continue;
      field.value = chosen[name];
    }
    draw();
  }
  function offer(name, values) {
    const field = $("filters").elements[name], wanted = ["", ...values];
    if (chosen[name] && !wanted.includes(chosen[name])) wanted.push(chosen[name]);
    if (wanted.join("\0") !== field.dataset.offered) {
      field.replaceChildren(...wanted.map((value) => new Option(value || "all", value)));
      field.dataset.offered = wanted.join("\0");
    }
    field.value = chosen[name];
  }

  // --- asking --------------------------------------------------------------------------------------------------------

  async function ask(path) {
    const token = sessionStorage.getItem("kproxy-token");
    const answer = await fetch(path, { headers: token ? { Authorization: "Bearer " + token } : {}, cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (answer.status === 401) {
      login(token ? "That is not its token." : "");
      throw new Error("this kproxy wants its token");
    }
    if (!answer.ok) throw new Error((await answer.text()).trim().slice(0, 200) || "HTTP " + answer.status);
    return answer.json();
  }
  function login(fault) {
    if ($("login").open) return;
    sessionStorage.removeItem("kproxy-token");
    $("login-fault").textContent = fault;
    $("login").showModal();
  }
  function forget() {
    series = []; groupNames = []; samples = []; current = null; answers = []; slow = []; lags = [];
  }
  async function poll() {
    if (asking) return; // one request at a time: the answer to a second one would count twice
    let wait = 1000;
    asking = true;
    try {
      if (!paused && !document.hidden && !$("login").open) {
        const seen = samples.length ? samples[samples.length - 1].n : 0;
        const slowest = Math.max(0, (slow.length ? d3.max(slow, (row) => row.at_us) : 0) - LATE_US); // reported at its end
        take(await ask(`/api/live?after=${seen}&series=${series.length}&groups=${groupNames.length}&slow_after=${slowest}`));
        failures = 0;
        wait = last.interval_s * 1000;
        draw();
      }
    } catch (fault) {
      failures++;
      wait = Math.min(5000, 1000 * failures);
      state(fault.name === "TypeError" || fault.name === "TimeoutError" ? "kproxy does not answer; asking again" : fault.message, "bad");
    }
    asking = false;
    timer = setTimeout(poll, wait);
  }
  const identity = (row) => [row.connection, row.number, row.at_us].join();
  function take(answer) {
    if (startedMs && answer.state.started_ms !== startedMs) {
      forget(); // another process: its counters began anew, and its answer may leave out what the former one had sent
      startedMs = 0;
      last = answer;
      if (answer.first_series || answer.first_group) return;
    }
    startedMs = answer.state.started_ms;
    last = answer;
    if (answer.samples) {
      series.splice(answer.first_series, Infinity, ...answer.series);
      groupNames.splice(answer.first_group, Infinity, ...answer.group_names);
      samples.push(...answer.samples);
      samples.splice(0, samples.length - 400);
      current = answer.current;
    }
    if (answer.lags) lags = answer.lags;
    const rows = answer.slow.map((row) => Object.fromEntries(answer.slow_columns.map((name, i) => [name, row[i]])));
    const known = new Set(slow.map(identity));
    slow = [...rows.reverse().filter((row) => !known.has(identity(row))), ...slow].slice(0, 200);
    answers.push(answer);
    while (answers.length > 2 && answer.state.now_ms - answers[1].state.now_ms >= WINDOW_MS) answers.shift();
  }
  async function beside() {
    try {
      if (!paused && !document.hidden && last && !$("login").open) {
        if (!names.length) names = Object.keys(await ask("/api"));
        if (names.includes("connections")) connections = await ask("/api/connections?limit=200");
        const now = Date.now();
        if (names.includes("findings") && (!findings || now - findings.at > FINDINGS_MS)) findings = { at: now, rows: await ask("/api/findings") };
      }
    } catch { /* what is asked beside says nothing: poll() does */ }
    setTimeout(beside, CONNECTIONS_MS);
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  const node = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (value != null && value !== false) key === "class" ? (made.className = value) : made.setAttribute(key, value);
    made.append(...children.map((child) => (child instanceof Node ? child : String(child ?? ""))));
    return made;
  };

  function state(text, kind = "") {
    $("state").textContent = text;
    $("state").className = kind;
  }

  // The sample that is under way belongs to the one before it for as long as it is short: rates of a second jump.
  function sampled() {
    const before = samples[samples.length - 1];
    if (!current) return samples;
    if (!before || current.d > before.d / 2) return [...samples, current];
    return [...samples.slice(0, -1), { t: current.t, d: before.d + current.d, s: [...before.s, ...current.s], g: [...before.g, ...current.g] }];
  }
  function shownSamples() {
    const all = sampled();
    const from = last.state.now_ms - Number(chosen.range) * 1000;
    return all.filter((sample) => sample.t > from && sample.d > 0.5);
  }

  // One point for each sample: rates by API, and errors.
  function points() {
    return shownSamples().map((sample) => {
      const point = { t: sample.t, d: sample.d, apis: {}, requests: 0, errors: 0, throttled: 0, counts: buckets() };
      for (const [index, requests, errors, , , throttled, , pairs] of sample.s) {
        const [cluster, broker, api] = series[index] ?? series[0];
        if (!matches(cluster, broker, api)) continue;
        point.apis[api] = (point.apis[api] ?? 0) + requests / sample.d;
        point.requests += requests / sample.d;
        point.errors += errors / sample.d;
        point.throttled += throttled / sample.d;
        if (chosen.api || !WAITING.has(api)) fill(point.counts, pairs, 1);
      }
      return point;
    });
  }

  function frame(id, height, domain) {
    const box = $(id), width = Math.max(200, box.clientWidth), margin = { left: 56, right: 26, top: 6, bottom: 20 };
    let svg = d3.select(box).select("svg");
    if (svg.empty()) svg = d3.select(box).append("svg").attr("role", "img").attr("aria-label", box.previousElementSibling.textContent);
    svg.attr("viewBox", null).selectAll("*").remove();
    const x = d3.time.scale().domain(domain).range([margin.left, width - margin.right]);
    const bottom = height - margin.bottom;
    const axis = d3.svg.axis().scale(x).orient("bottom").ticks(Math.max(2, Math.floor(width / 90))).tickFormat(d3.time.format(domain[1] - domain[0] < 300000 ? "%H:%M:%S" : "%H:%M")).tickSize(3, 0);
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${bottom})`).call(axis);
    return { box, svg, x, width, bottom, margin };
  }
  function yAxis({ svg, width, margin }, y, ticks, format) {
    svg.insert("g", ":first-child").attr("class", "axis grid").attr("transform", `translate(${margin.left},0)`)
      .call(d3.svg.axis().scale(y).orient("left").tickValues(ticks).tickFormat(format).tickSize(-(width - margin.left - margin.right), 0).tickPadding(6));
  }
  function legend(box, entries) {
    let list = box.parentNode.querySelector("ul.legend");
    if (!list) box.after((list = node("ul", { class: "legend" })));
    list.replaceChildren(...entries.map(([name, colour]) => node("li", {}, node("i", { class: "s" + colour }), name)));
  }
  function nothing({ svg, x, bottom }, text) {
    svg.append("text").attr("class", "none").attr("x", (x.range()[0] + x.range()[1]) / 2).attr("y", bottom / 2).attr("text-anchor", "middle").text(text);
  }
  // The time that is chosen; of a young process what there is, two minutes at least.
  const domain = () => {
    const now = last.state.now_ms, first = samples.length ? samples[0].t - samples[0].d * 1000 : now;
    return [new Date(Math.max(now - Number(chosen.range) * 1000, Math.min(first, now - 120000))), new Date(now)];
  };
  const height = (id) => $(id).clientHeight || 190;

  function drawRequests(all) {
    const on = frame("requests", height("requests"), domain());
    const totals = {};
    for (const point of all) for (const [api, rate] of Object.entries(point.apis)) totals[api] = (totals[api] ?? 0) + rate * point.d;
    const apis = Object.keys(totals).sort((a, b) => totals[b] - totals[a]);
    const named = apis.slice(0, apis.length > COLOURS ? COLOURS - 1 : COLOURS), rest = apis.slice(named.length);
    const layers = [...named, ...(rest.length ? ["others"] : [])].map((name) => ({
      name,
      values: all.map((point) => ({ x: point.t, y: name === "others" ? rest.reduce((sum, api) => sum + (point.apis[api] ?? 0), 0) : point.apis[name] ?? 0 })),
    }));
    const top = d3.max(all, (point) => point.requests) || 1;
    const y = d3.scale.linear().domain([0, top]).range([on.bottom, on.margin.top]).nice(4);
    yAxis(on, y, y.ticks(4), number);
    if (all.length < 2) return nothing(on, "samples come within 20 seconds");
    const area = d3.svg.area().x((d) => on.x(d.x)).y0((d) => y(d.y0)).y1((d) => y(d.y0 + d.y));
    d3.layout.stack().values((layer) => layer.values)(layers).forEach((layer, i) => on.svg.append("path").attr("class", "area s" + i).attr("d", area(layer.values)));
    legend(on.box, layers.map((layer, i) => [layer.name, i]));
  }

  function drawLines(id, all, lines, { log = false, format }) {
    const on = frame(id, height(id), domain());
    const values = lines.flatMap((line) => all.map(line.value)).filter((value) => value != null);
    let y, ticks;
    if (log) {
      const low = Math.max(1e-5, d3.min(values.filter((v) => v > 0)) ?? 1e-3), high = Math.max(low * 10, d3.max(values) ?? 1);
      const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
      y = d3.scale.log().domain([10 ** from, 10 ** to]).range([on.bottom, on.margin.top]).clamp(true);
      ticks = d3.range(from, to + 1).map((power) => 10 ** power);
    } else {
      y = d3.scale.linear().domain([0, d3.max(values) || 1]).range([on.bottom, on.margin.top]).nice(4);
      ticks = y.ticks(4);
    }
    yAxis(on, y, ticks, format);
    if (all.length < 2) return nothing(on, "–");
    lines.forEach((line) => {
      const path = d3.svg.line().defined((p) => line.value(p) != null).x((p) => on.x(p.t)).y((p) => y(line.value(p)));
      on.svg.append("path").attr("class", "line s" + line.colour).attr("d", path(all));
    });
    legend(on.box, lines.map((line) => [line.name, line.colour]));
  }

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  function drawHeat(all) {
    const on = frame("heat", height("heat"), domain());
    let canvas = on.box.querySelector("canvas");
    if (!canvas) on.box.prepend((canvas = node("canvas", { "aria-hidden": "true" })));
    const scale = window.devicePixelRatio || 1, bounds = last.bounds_s;
    canvas.width = on.width * scale;
    canvas.height = height("heat") * scale;
    let low = bounds.length, high = 0;
    for (const { counts } of all) counts.forEach((n, i) => { if (n) { low = Math.min(low, i); high = Math.max(high, i); } });
    if (low > high) { low = 3; high = 12; }
    low = Math.max(0, low - 1); high = Math.min(bounds.length, high + 1);
    const y = d3.scale.linear().domain([low, high + 1]).range([on.bottom, on.margin.top]);
    const ticks = d3.range(low, high + 1, Math.max(1, Math.round((high - low) / 6))).filter((i) => i < bounds.length);
    yAxis(on, y, ticks.map((i) => i + 1), (i) => duration(bounds[i - 1]));
    const context = canvas.getContext("2d"), top = d3.max(all, (p) => d3.max(p.counts, (n) => n / p.d)) || 1;
    const shade = d3.scale.log().domain([0.05, Math.max(1, top)]).range([variable("--heat-0"), variable("--heat-1")]).interpolate(d3.interpolateLab).clamp(true);
    context.scale(scale, scale);
    for (const point of all) {
      const left = Math.max(on.margin.left, on.x(point.t - point.d * 1000)), right = on.x(point.t);
      point.counts.forEach((n, i) => {
        if (!n) return;
        context.fillStyle = shade(Math.max(0.05, n / point.d));
        context.fillRect(left, y(i + 1), Math.max(1, right - left + 0.6), y(i) - y(i + 1) - 0.6);
      });
    }
    if (!all.some((point) => point.counts.some(Boolean))) nothing(on, "nothing was answered");
  }

  function table(id, columns, rows, { empty = "nothing yet", order = null, idle = () => false } = {}) {
    const box = $(id), by = sorted[id] ?? order;
    if (!rows.length) return box.replaceChildren(node("p", { class: "none" }, empty));
    if (by) {
      const column = columns.find((each) => each.name === by.name) ?? columns[0];
      rows = [...rows].sort((a, b) => {
        const one = column.value(a), other = column.value(b);
        if (one == null || other == null) return (one == null) - (other == null);
        return (one < other ? -1 : one > other ? 1 : 0) * (by.down ? -1 : 1);
      });
    }
    const head = node("tr", {}, ...columns.map((column) => {
      const isSorted = by && by.name === column.name;
      const button = node("button", { type: "button" }, column.name + (isSorted ? (by.down ? " ↓" : " ↑") : ""));
      button.addEventListener("click", () => { sorted[id] = { name: column.name, down: isSorted ? !by.down : !!column.number }; draw(); });
      return node("th", { class: column.number ? "n" : null, scope: "col", "aria-sort": isSorted ? (by.down ? "descending" : "ascending") : null }, button);
    }));
    const all = opened[id] ? rows : rows.slice(0, ROWS);
    const body = all.map((row) => node("tr", { class: idle(row) ? "idle" : null }, ...columns.map((column) => {
      const content = column.show ? column.show(row) : column.value(row);
      const kind = [column.number ? "n" : "", column.fit ?? "", column.kind?.(row) ?? ""].join(" ").trim();
      return node("td", { class: kind || null, title: content instanceof Node ? null : String(content ?? "") }, content ?? "–");
    })));
    const parts = [node("table", {}, node("thead", {}, head), node("tbody", {}, ...body))];
    if (rows.length > ROWS) {
      const more = node("button", { type: "button", class: "more" }, opened[id] ? "fewer" : `all ${rows.length}`);
      more.addEventListener("click", () => { opened[id] = !opened[id]; draw(); });
      parts.push(more);
    }
    const focused = box.contains(document.activeElement) ? [...box.querySelectorAll("button, a")].indexOf(document.activeElement) : -1;
    box.replaceChildren(...parts);
    if (focused >= 0) box.querySelectorAll("button, a")[focused]?.focus();
  }
  const link = (name, value) => {
    const made = node("a", { href: "?" + new URLSearchParams({ [name]: value }) }, value);
    made.addEventListener("click", (event) => { event.preventDefault(); choose({ [name]: chosen[name] === value ? "" : value }); });
    return made;
  };
  const column = (name, value, more = {}) => ({ name, value, ...more });
  const fits = (columns) => ({ fit: `fit${columns}` }); // so many columns are cut where a table has no room, before figures are out of sight
  const figure = (name, value, format = number, more = {}) => ({ name, value, number: true, show: (row) => format(value(row)), ...more });

  // Totals of an answer: all, where there are not more than it holds; or all of them without brokers (`apis`) or APIs (`of_brokers`).
  function listed(answer, of) {
    if (of === "totals" || !last[of] || answer[of]) return answer[of] ?? answer.totals;
    const sums = new Map();
    for (const [cluster, broker, api, ...counts] of answer.totals) {
      const names = of === "apis" ? [cluster, "", api] : [cluster, broker, ""], name = names.join("\0"), sum = sums.get(name);
      if (!sum) sums.set(name, [...names, ...counts]);
      else counts.forEach((value, i) => (sum[i + 3] = i < 6 ? sum[i + 3] + value : [...sum[i + 3], ...value]));
    }
    return [...sums.values()];
  }
  // A row that was not there before begins at 0, unless it may have been left out.
  const begun = (counts, earlier, whole) => earlier ?? (whole ? counts.map((value) => (Array.isArray(value) ? [] : 0)) : counts);

  // Rows of totals now less those of some seconds ago.
  function recent(of) {
    const now = answers[answers.length - 1], first = answers[0];
    const seconds = Math.max(0.001, (now.state.now_ms - first.state.now_ms) / 1000);
    const earlier = new Map(listed(first, of).map((row) => [row.slice(0, 3).join("\0"), row.slice(3)]));
    const whole = of !== "totals" || !first.apis;
    const rows = listed(now, of).map(([cluster, broker, api, ...counts]) => {
      const was = begun(counts, earlier.get([cluster, broker, api].join("\0")), whole);
      const duration = buckets();
      fill(duration, counts[6], 1);
      fill(duration, was[6], -1);
      const waits = buckets(); // of clients: the broker's time plus queue, mute, sending and receiving
      fill(waits, counts[7] ?? [], 1);
      fill(waits, was[7] ?? [], -1);
      const rates = counts.slice(0, 6).map((value, i) => (value - was[i]) / seconds);
      return { cluster, broker, api, requests: rates[0], errors: rates[1], to: rates[2], from: rates[3], throttled: rates[4], duration, waits, total: counts[0], cpu: 0 };
    });
    return { rows, seconds, cpu: (now.state.cpu_s - first.state.cpu_s) / seconds };
  }
  function added(rows, key) {
    const sums = new Map();
    for (const row of rows) {
      const name = key(row);
      let sum = sums.get(name);
      if (!sum) sums.set(name, (sum = { ...row, requests: 0, errors: 0, to: 0, from: 0, throttled: 0, total: 0, duration: buckets(), waits: buckets() }));
      for (const each of ["requests", "errors", "to", "from", "throttled", "total"]) sum[each] += row[each];
      row.duration.forEach((n, i) => (sum.duration[i] += n));
      row.waits.forEach((n, i) => (sum.waits[i] += n));
    }
    return [...sums.values()];
  }
  const rates = () => [
    figure("requests/s", (row) => row.requests),
    figure("p50", (row) => quantile(row.duration, 0.5), duration),
    figure("p99", (row) => quantile(row.duration, 0.99), duration),
    figure("wait p99", (row) => quantile(row.waits, 0.99), duration),
    figure("errors/s", (row) => row.errors, number, { kind: (row) => (row.errors > 0 ? "warn" : "") }),
    figure("to brokers/s", (row) => row.to, bytes),
    figure("to clients/s", (row) => row.from, bytes),
  ];

  function tile(label, value, kind = "") {
    return node("div", { class: "tile " + kind }, node("b", {}, value), node("span", {}, label));
  }

  function strip(cluster, group) {
    const wide = 130, [from, to] = domain().map(Number), svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("class", "strip");
    svg.setAttribute("role", "img");
    const put = (kind, left, width) => {
      const mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      for (const [name, value] of Object.entries({ class: kind, x: left, y: kind === "track" ? 7 : 1, width, height: kind === "track" ? 2 : 14 })) mark.setAttribute(name, value);
      svg.append(mark);
    };
    put("track", 0, wide);
    let times = 0;
    for (const sample of shownSamples())
      for (const [index, rebalances, isOn] of sample.g) {
        const name = groupNames[index];
        if (!name || name[0] !== cluster || name[1] !== group) continue;
        times += rebalances;
        const left = ((sample.t - sample.d * 1000 - from) / (to - from)) * wide;
        put(rebalances ? "mark" : isOn ? "now" : "track", Math.max(0, left), Math.max(2, (sample.d * 1000 * wide) / (to - from)));
      }
    svg.setAttribute("aria-label", `${times} rebalances`);
    return svg;
  }

  // Format a number by the unit at the end of its name.
  function said(name, value) {
    const bare = name.replace(/_(ns|us|ms)$/, "").replaceAll("_", " ");
    if (typeof value !== "number") return `${bare} ${value}`;
    const unit = { ns: 1e-9, us: 1e-6, ms: 1e-3 }[name.split("_").pop()];
    if (unit) return `${bare} ${duration(value * unit)}`;
    if (name.split("_").includes("bytes")) return `${bare} ${bytes(value)}${name.endsWith("_per_s") ? "/s" : ""}`;
    return name.endsWith("share") ? `${bare} ${Math.round(value * 100)} %` : `${bare} ${Number.isInteger(value) ? count(value) : number(value)}`;
  }
  // The answer has only the largest of peers' names: say so to a reader who looks for another one.
  const among = (rows, filtered, empty) => (rows.length < MOST ? empty : chosen.find && !filtered ? `none of the ${MOST} largest has this in its name` : empty);
  const largest = (rows) => (rows.length < MOST ? "" : `the ${MOST} largest`);
  function cut(id, text) {
    const title = $(id).parentNode.querySelector("h2");
    let note = title.querySelector(".cut");
    if (!note) title.append(" ", (note = node("small", { class: "cut" })));
    note.textContent = text;
  }

  function drawFindings() {
    const rows = Array.isArray(findings?.rows) ? findings.rows : findings?.rows?.findings ?? [];
    $("findings").parentNode.hidden = !findings;
    if (!findings) return;
    if (!rows.length) return $("findings").replaceChildren(node("p", { class: "none" }, "nothing stands out"));
    $("findings").replaceChildren(...rows.slice(0, 30).map((each) => {
      const evidence = Object.entries(each.evidence ?? {}).map(([name, value]) => said(name, value)).join(", ");
      return node("div", { class: "finding " + (each.severity === "critical" ? "high" : "") },
        node("small", {}, each.severity ?? ""), " ", node("b", {}, `${each.title ?? each.kind}: ${each.where ?? ""}`), ...[evidence, each.why, each.change].filter(Boolean).map((text) => node("p", {}, text)));
    }));
  }

  function draw() {
    if (!last || !answers.length) return;
    const { state: of } = last;
    $("version").textContent = of.version + (of.workers > 1 ? ` · ${of.workers} workers` : "");
    if (paused) state("paused", "warn");
    else if (of.draining) state("draining", "warn");
    else if (!of.ready) state("not ready: " + of.not_ready.join("; "), "bad");
    else if (!failures) state("ready");
    const unique = (values) => [...new Set(values)].sort();
    const clusters = unique(last.totals.map((row) => row[0]).concat(last.brokers.map((row) => row[0])));
    const inOne = (value) => (clusters.length > 1 ? [column("cluster", value, { fit: "cluster" })] : []); // names are those of one cluster
    offer("cluster", clusters);
    offer("broker", unique(last.brokers.filter((row) => matches(row[0], chosen.broker, chosen.api)).map((row) => row[1])));
    offer("api", unique(listed(last, chosen.broker ? "totals" : "apis").filter((row) => matches(row[0], row[1], chosen.api)).map((row) => row[2])));

    const isWhole = !last.apis, { rows, seconds, cpu } = recent(chosen.broker ? "totals" : "apis"), earlier = answers[0];
    const mine = rows.filter((row) => matches(row.cluster, row.broker, row.api));
    const all = added(mine, () => "")[0] ?? { requests: 0, errors: 0, to: 0, from: 0, throttled: 0, duration: buckets() };
    const timed = added(mine.filter((row) => chosen.api || !WAITING.has(row.api)), () => "")[0] ?? { duration: buckets(), waits: buckets() };
    const brokers = last.brokers.filter((row) => matches(row[0], row[1], chosen.api));
    const sum = (index) => brokers.reduce((total, row) => total + row[index], 0);
    const open = chosen.cluster || chosen.broker ? sum(2) : of.connections;
    const process = (current ?? samples[samples.length - 1])?.p ?? [null, null];
    $("tiles").replaceChildren(
      tile("requests/s", number(all.requests)), tile("to brokers/s", bytes(all.to)), tile("to clients/s", bytes(all.from)),
      tile("client's wait, p99", duration(quantile(timed.waits, 0.99))), tile("broker's time, p50", duration(quantile(timed.duration, 0.5))), tile("broker's time, p99", duration(quantile(timed.duration, 0.99))),
      tile("errors/s", number(all.errors), all.errors > 0 ? "warn" : ""), tile("throttled/s", number(all.throttled), all.throttled > 0 ? "warn" : ""),
      tile("connections", count(open)), tile("in flight", count(sum(3))),
      tile("in kproxy, p99", duration(process[0])), tile("cores of kproxy", number(cpu), cpu > 0.9 * of.workers ? "bad" : ""),
    );

    const over = points();
    drawRequests(over);
    drawLines("latency", over, [
      { name: "p50", colour: 0, value: (point) => (point.p50 === undefined ? (point.p50 = quantile(point.counts, 0.5)) : point.p50) },
      { name: "p99", colour: 1, value: (point) => (point.p99 === undefined ? (point.p99 = quantile(point.counts, 0.99)) : point.p99) },
    ], { log: true, format: duration });
    drawHeat(over);
    drawLines("trouble", over, [
      { name: "errors", colour: 1, value: (point) => point.errors },
      { name: "throttled answers", colour: 2, value: (point) => point.throttled },
    ], { format: number });

    table("apis", [column("API", (row) => row.api, { show: (row) => link("api", row.api) }), ...rates()], added(mine, (row) => row.api), { order: { name: "requests/s", down: true }, idle: (row) => !row.requests });
    cut("apis", isWhole || !chosen.broker ? "" : `of the ${last.totals.length} largest of all brokers`);
    const ofBrokers = recent(chosen.api ? "totals" : "of_brokers").rows.filter((row) => matches(row.cluster, row.broker, row.api || chosen.api));
    const ofBroker = new Map(added(ofBrokers, (row) => row.cluster + "\0" + row.broker).map((row) => [row.cluster + "\0" + row.broker, row]));
    const idle = { requests: 0, errors: 0, to: 0, from: 0, duration: buckets(), waits: buckets() };
    table("brokers", [
      column("broker", (row) => row.broker, { show: (row) => link("broker", row.broker) }),
      column("cluster", (row) => row.cluster, { show: (row) => link("cluster", row.cluster) }),
      figure("connections", (row) => row.connections, count), figure("in flight", (row) => row.inflight, count), ...rates(),
    ], brokers.map(([cluster, broker, open, inflight]) => ({ ...(ofBroker.get(cluster + "\0" + broker) ?? idle), cluster, broker, connections: open, inflight })), { order: { name: "broker", down: false }, idle: (row) => !row.requests });

    table("slow", [
      column("at", (row) => row.at_us, { show: (row) => clock(row.at_us / 1000) }), column("API", (row) => row.api), column("broker", (row) => row.broker), ...inOne((row) => row.cluster),
      column("client id", (row) => row.client_id ?? ""), column("client", (row) => row.client),
      figure("whole wait", (row) => row.wait_s, duration),
      figure("broker's time", (row) => row.broker_s, duration, { kind: (row) => (row.over_s >= 1 ? "bad" : "") }),
      figure("queue", (row) => row.queue_s, duration), figure("mute", (row) => row.muted_s, duration),
      figure("throttle", (row) => row.throttle_ms / 1000, duration), figure("request", (row) => row.request_bytes, bytes), figure("answer", (row) => row.response_bytes, bytes),
      column("error", (row) => row.error), figure("correlation id", (row) => row.correlation_id, String),
    ], slow.filter((row) => matches(row.cluster, row.broker, row.api) && found(row.client_id, row.client)), { empty: "nothing took longer than 10 ms", order: { name: "at", down: true } });

    const errorsBefore = new Map(earlier.errors.map((row) => [row.slice(0, 4).join("\0"), row[4]]));
    table("errors", [
      column("error", (row) => row[3], fits(1)), column("API", (row) => row[2]), column("broker", (row) => row[1]), ...inOne((row) => row[0]),
      figure("per s", (row) => (row[4] - (errorsBefore.get(row.slice(0, 4).join("\0")) ?? (earlier.errors.length < MOST ? 0 : row[4]))) / seconds), figure("so far", (row) => row[4], count),
    ], last.errors.filter((row) => matches(row[0], row[1], row[2])), { empty: "none", order: { name: "so far", down: true } });

    const inCluster = (row) => matches(row[0], chosen.broker, chosen.api);
    const topics = last.topics.filter((row) => inCluster(row) && found(row[1]));
    const groups = last.groups.filter((row) => inCluster(row) && found(row[1]));
    const behind = lags.filter((row) => inCluster(row) && found(row[2], row[3]));
    const clients = last.clients.filter((row) => inCluster(row) && found(row[1], row[2]));
    for (const [id, rows] of Object.entries({ errors: last.errors, topics: last.topics, groups: last.groups, lags, clients: last.clients, brokers: last.brokers })) cut(id, largest(rows));
    const hint = Object.values(of.detail).every((detail) => detail === "headers") ? 'known with detail = "topics"' : "nothing yet";
    const topicsBefore = new Map(earlier.topics.map((row) => [row[0] + "\0" + row[1], row]));
    const rate = (row, index) => (row[index] - (topicsBefore.get(row[0] + "\0" + row[1])?.[index] ?? (earlier.topics.length < MOST ? 0 : row[index]))) / seconds;
    table("topics", [
      column("topic", (row) => row[1], fits(1)), ...inOne((row) => row[0]), figure("produced/s", (row) => rate(row, 2), bytes), figure("records/s", (row) => rate(row, 3)),
      figure("fetched/s", (row) => rate(row, 4), bytes), figure("records/s ", (row) => rate(row, 5)),
    ], topics, { empty: among(last.topics, topics.length, hint), order: { name: "produced/s", down: true }, idle: (row) => [2, 3, 4, 5].every((index) => !rate(row, index)) });

    table("groups", [
      column("group", (row) => row[1]), ...inOne((row) => row[0]), column("protocol", (row) => row[8] ?? ""), column("type", (row) => row[9] ?? ""),
      column("state", (row) => row[2], { kind: (row) => (["Stable", "Empty", "Dead"].includes(row[2]) ? "" : "warn") }),
      figure("members", (row) => row[3], count), figure("rebalances", (row) => row[5], count), figure("time in them", (row) => row[6], duration),
      figure("refused", (row) => row[7], count, { kind: (row) => (row[7] ? "warn" : "") }),
      column("over time", (row) => row[5], { show: (row) => strip(row[0], row[1]) }),
    ], groups, { empty: among(last.groups, groups.length, hint), order: { name: "rebalances", down: true } });

    table("lags", [
      column("consumer", (row) => row[2], fits(2)), column("is a", (row) => (row[1] === "group" ? "group" : "client")), column("topic", (row) => row[3], fits(2)), ...inOne((row) => row[0]),
      // In the order in which kproxy cuts the list: groups that may be behind come first.
      { ...figure("records", (row) => row[4] || (row[6] ? 0.5 : row[4])), show: (row) => (!row[6] ? count(row[4]) : row[4] == null ? "unknown" : "≥ " + count(row[4])) },
      figure("time", (row) => row[5], duration), ...(behind.some((row) => row[6]) ? [figure("unknown partitions", (row) => row[6], count)] : []),
    ], behind, { empty: among(lags, behind.length, hint), order: { name: "records", down: true } });

    table("clients", [
      column("client id", (row) => row[1], fits(2)), ...inOne((row) => row[0]), column("software", (row) => row[2], fits(2)), column("version", (row) => row[3]), figure("connections", (row) => row[4], count),
    ], clients, { empty: among(last.clients, clients.length, "none has named its software"), order: { name: "connections", down: true } });

    $("connections-of").textContent = connections.length >= 200 ? `the first ${connections.length} of ${count(of.connections)}` : "";
    table("connections", [
      column("client", (row) => row.client), column("client id", (row) => row.client_id ?? ""), column("principal", (row) => row.principal ?? ""), column("software", (row) => row.software ?? ""),
      column("broker", (row) => row.broker ?? row.listener), ...inOne((row) => row.cluster), figure("in flight", (row) => row.requests_pending, count), figure("requests", (row) => row.requests, count),
      figure("sent", (row) => row.bytes_in, bytes), figure("got", (row) => row.bytes_out, bytes),
      figure("age", (row) => last.state.now_ms / 1000 - row.opened_ns / 1e9, duration), column("TLS", (row) => row.tls ?? ""), figure("number", (row) => row.number, String),
    ], connections.filter((row) => matches(row.cluster, String(row.broker ?? "bootstrap"), chosen.api) && found(row.client, row.client_id, row.principal, row.software)), { empty: "none", order: { name: "in flight", down: true } });
    drawFindings();
  }

  // --- beginning -----------------------------------------------------------------------------------------------------

  $("filters").addEventListener("input", (event) => choose({ [event.target.name]: event.target.value }));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("pause").addEventListener("click", () => { paused = !paused; $("pause").setAttribute("aria-pressed", paused); draw(); });
  $("login-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("kproxy-token", event.target.elements.token.value.trim());
    event.target.reset();
    $("login").close();
    clearTimeout(timer);
    poll();
  });
  $("login").addEventListener("cancel", (event) => event.preventDefault());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(timer); poll(); } });
  addEventListener("popstate", fromUrl);
  addEventListener("resize", () => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
  fromUrl();
  poll();
  beside();
})();
