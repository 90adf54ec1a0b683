// One view is one URL. This asks the server for what the URL says, one question at a time, and turns what is done on
// charts (zoom, box, click, arrow keys) into another URL. Nothing here knows what a chart means.
(() => {
  "use strict";

  const state = { busy: false, whole: true, serial: 0, again: null, rest: [], path: null, search: null, theme: null, generation: 0, live: false, focus: null, asked: 0, quiet: 0 };
  const REST = 4;  // times as long as an answer took with all that follows it, before one asks how a run goes on
  const LONGEST_MS = 10_000;
  const root = document.documentElement;
  const props = (id, values) => window.dash_clientside.set_props(id, values);
  const $ = (id) => document.getElementById(id);

  // ---- asking -----------------------------------------------------------------------------------------------

  function ask(reason) {
    if (state.busy) {
      state.again = state.again === "url" ? "url" : reason;
      return;
    }
    const path = location.pathname, search = location.search, theme = root.dataset.theme;
    const question = { path, search, theme, serial: state.serial + 1, generation: 0, panels: null, bar: true };
    if (path !== state.path || shape(path, search) !== state.shape) {
      state.rest = [];
    } else if (reason === "pulse") {
      question.generation = state.generation;
      split(question);
    } else if (reason === "rest" || reason === "pending") {
      question.panels = reason === "rest" ? state.rest.splice(0) : pending();
      question.bar = false;
      if (!question.panels.length) return;
    } else if (search === state.search && theme === state.theme) {
      return;
    } else {
      split(question);
    }
    state.whole = question.bar;
    if (question.bar) state.asked = performance.now();
    state.serial = question.serial;
    const turned = path !== state.path;
    state.shape = shape(path, search);
    Object.assign(state, { busy: true, path, search, theme, turned });
    state.focus = turned ? null : trail(document.activeElement);
    document.body.classList.toggle("asking", reason === "url");
    navigation();
    props("question", { data: question });
  }

  // Panels that are in sight are asked for first, the others behind them.
  function split(question) {
    const near = [], far = [];
    for (const each of document.querySelectorAll("[data-chart], [data-part]")) {
      const box = each.getBoundingClientRect(), name = each.dataset.chart || each.dataset.part;
      (box.bottom > 0 && box.top < window.innerHeight ? near : far).push(name);
    }
    state.rest = near.length ? far : [];
    question.panels = near.length ? near : far;
  }

  // What decides which panels a page has, beside its path.
  function shape(path, search) {
    const query = new URLSearchParams(search);
    if (path === "/runs") return search;
    if (path === "/compare") return [query.has("with"), query.has("policy")].join();
    return path === "/request" ? String(query.get("rid")) : "";
  }

  function done(answer) {
    if (!answer) {
      if (state.serial === 0) { searchField(); ask("url"); }
      return window.dash_clientside.no_update;
    }
    if (answer.serial !== state.serial) return window.dash_clientside.no_update;
    state.busy = false;
    // What is drawn behind the rest may be of a later moment: that the run has grown, or ended, is not shown by it.
    if (state.whole) Object.assign(state, { generation: answer.generation, live: answer.live });
    state.origin = answer.origin;
    state.window = answer.window;
    state.run = answer.run;
    if (answer.rest) state.rest = answer.rest;
    document.title = `${answer.title} · schedscope`;
    document.body.classList.remove("asking");
    $("offline").hidden = true;
    if (answer.page !== undefined) $("page").innerHTML = answer.page;
    for (const [name, html] of Object.entries(answer.parts || {})) window.morph(document.querySelector(`[data-part="${name}"]`), html);
    for (const name of ["bar", "notice"]) if (answer[name] !== undefined) window.morph($(name), answer[name]);
    window.charts.show(answer.charts || {});
    navigation();
    settle();
    document.body.dataset.rest = String(state.rest.length);
    document.body.dataset.serial = String(answer.serial);
    state.quiet = performance.now() + Math.min(REST * (performance.now() - state.asked), LONGEST_MS);
    // The next question is for Dash's next turn.
    setTimeout(() => {
      const again = state.again;
      state.again = null;
      if (again) ask(again);
      if (!state.busy && state.rest.length) ask("rest");
    });
    return window.dash_clientside.no_update;
  }

  function pending() {
    const named = new Set();
    for (const each of document.querySelectorAll("[data-pending]")) {
      const part = each.closest("[data-part]");
      if (part) named.add(part.dataset.part);
    }
    return [...named, ...window.charts.pending()];
  }

  setInterval(() => {
    if (document.hidden || state.busy || dragging) return;
    if (pending().length) ask("pending");
    else if (state.live && performance.now() > state.quiet) ask("pulse");
  }, 1000);

  // An answer that never came is asked for again when the server is back; one that takes long is waited for.
  const fetched = window.fetch;
  window.fetch = (...request) => {
    const answer = fetched(...request);
    if (String(request[0]).includes("_dash-update-component")) answer.then((got) => { if (!got.ok) lost(); }, lost);
    return answer;
  };

  function lost() {
    $("offline").textContent = "The dashboard's server does not answer. What you see is from before; this page goes on by itself when the server is back.";
    $("offline").hidden = false;
    const again = () => fetched("/healthz", { cache: "no-store" }).then((got) => (got.ok ? back() : setTimeout(again, 2000)), () => setTimeout(again, 2000));
    setTimeout(again, 1000);
  }

  function back() {
    Object.assign(state, { busy: false, path: null });
    ask("url");
  }

  // ---- the URL ----------------------------------------------------------------------------------------------

  function change(values, { path = location.pathname, push = true } = {}) {
    const query = new URLSearchParams(location.search);
    if (state.run && !query.has("run")) query.set("run", state.run);
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === "") query.delete(name);
      else query.set(name, value);
    }
    go(`${path}?${query}`, push);
  }

  function go(url, push = true) {
    if (push) history.pushState({}, "", url);
    else history.replaceState({}, "", url);
    ask("url");
  }

  window.addEventListener("popstate", () => ask("url"));
  const WHOLE = { from: null, to: null, last: null };

  const KEPT = { "/": ["run", "rank", "from", "to", "last", "at", "box"], "/pass": ["run", "rank", "pass", "policy", "from", "to", "last", "at"], "/runs": ["run"] };

  function navigation() {
    const query = new URLSearchParams(location.search);
    if (state.run && !query.has("run")) query.set("run", state.run);
    for (const link of document.querySelectorAll("header.top [data-page]")) {
      const page = link.dataset.page, kept = new URLSearchParams();
      const names = KEPT[page] || ["run", "rank", "from", "to", "last", "at", "rid", "pass", "with", "policy"];
      for (const name of names) if (query.has(name)) kept.set(name, query.get(name));
      const words = kept.toString();
      link.setAttribute("href", page + (words ? `?${words}` : ""));
      if (link.closest("nav")) {
        if (page === location.pathname) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
      }
    }
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href]");
    if (!link || link.dataset.native || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const url = new URL(link.href, location.href);
    if (url.origin !== location.origin || link.hasAttribute("download")) return;
    event.preventDefault();
    go(url.pathname + url.search);
  });

  // ---- what is shown ----------------------------------------------------------------------------------------

  document.addEventListener("change", (event) => { if (event.target.dataset.key) chosen(event.target.dataset.key, event.target.value); });

  function searchField() {
    const place = document.querySelector("[data-search]");
    if (!place || place.dataset.made) return;
    place.dataset.made = "1";
    const field = document.createElement("input");
    Object.assign(field, { id: "find", type: "search", placeholder: place.dataset.search, autocomplete: "off", spellcheck: false });
    field.setAttribute("aria-label", place.dataset.search);
    place.append(field);
  }

  function chosen(name, value) {
    if (name === "run") go(`${["/runs", "/pass", "/request"].includes(location.pathname) ? "/" : location.pathname}?${new URLSearchParams({ run: value })}`);
    else if (name === "with") change({ with: value, policy: null });
    else if (name === "policy" && location.pathname === "/compare") change({ policy: value, with: null });
    else change({ [name]: value });
  }

  function trail(element) {
    if (!element || element === document.body) return null;
    if (element.dataset.key) return `[data-key="${element.dataset.key}"]`;
    if (element.dataset.last !== undefined) return `[data-last="${element.dataset.last}"]`;
    return element.tagName === "A" && element.closest("#page") ? `#page a[href="${CSS.escape(element.getAttribute("href"))}"]` : null;
  }

  function settle() {
    if (state.turned) {
      window.scrollTo(0, 0);
      if (state.serial > 1) $("page").focus({ preventScroll: true });
      state.turned = false;
    } else if (state.focus && document.activeElement === document.body) {
      const found = document.querySelector(state.focus);
      if (found) found.focus({ preventScroll: true });
    }
  }

  // ---- charts -----------------------------------------------------------------------------------------------

  let dragging = null;
  const isTime = (graph) => Boolean(graph.layout && graph.layout.meta && graph.layout.meta.time);
  const moment = (graph, x) => (BigInt(graph.layout.meta.origin) + BigInt(Math.round(x * 1e9))).toString();
  const positive = (text) => (text.startsWith("-") ? "0" : text);

  function wire(graph) {
    graph.dataset.wired = "1";
    const hair = document.createElement("div");
    hair.className = "hair";
    graph.closest(".chart").append(hair);
    graph.on("plotly_relayout", (event) => {
      if (!isTime(graph) || event["xaxis.range[0]"] === undefined) return;
      zoom(graph, event["xaxis.range[0]"], event["xaxis.range[1]"]);
    });
    graph.on("plotly_selected", (event) => {
      if (!event || !event.range || !graph.layout.meta.box) return;
      const [x0, x1] = event.range.x, [y0, y1] = event.range.y.map((value) => 10 ** value);
      const low = Math.min(y0, y1).toPrecision(6), high = Math.max(y0, y1).toPrecision(6);
      change({ box: [positive(moment(graph, Math.min(x0, x1))), positive(moment(graph, Math.max(x0, x1))), +low, +high].join(",") });
    });
    graph.on("plotly_hover", (event) => { if (isTime(graph)) hairs(graph, event.xvals ? event.xvals[0] : event.points[0].x); });
    graph.on("plotly_unhover", () => hairs(graph, null));
  }

  document.addEventListener("chart", (event) => wire(event.target));

  function zoom(graph, begin, end) {
    const [low, high] = begin < end ? [begin, end] : [end, begin];
    if (high - low < 1e-6) return;
    change({ from: positive(moment(graph, low)), to: positive(moment(graph, high)), last: null });
  }

  function hairs(source, x) {
    for (const hair of document.querySelectorAll(".hair")) {
      const graph = hair.parentElement.querySelector(".js-plotly-plot");
      const full = graph && graph._fullLayout;
      if (x === null || !graph || !isTime(graph) || !full || !full.xaxis) { hair.style.display = "none"; continue; }
      const left = full.xaxis.d2p(x);
      const inside = left >= 0 && left <= full.xaxis._length && graph !== source;
      hair.style.display = inside ? "block" : "none";
      hair.style.left = `${full.xaxis._offset + left}px`;
    }
  }

  function at(graph, event) {
    const axis = graph._fullLayout.xaxis, box = graph.getBoundingClientRect();
    const place = event.clientX - box.left - axis._offset;
    return place >= 0 && place <= axis._length ? axis.p2d(place) : null;
  }

  let clicks = null;
  window.addEventListener("pointerdown", (event) => {
    const graph = event.target.closest && event.target.closest(".chart .js-plotly-plot");
    dragging = graph ? { graph, x: event.clientX, y: event.clientY } : null;
  }, true);
  window.addEventListener("pointerup", (event) => {
    const from = dragging;
    dragging = null;
    if (!from || !isTime(from.graph) || event.button || Math.hypot(event.clientX - from.x, event.clientY - from.y) > 4) return;
    const x = at(from.graph, event);
    if (x === null) return;
    if (clicks) {
      clearTimeout(clicks);
      clicks = null;
      change({ ...WHOLE, box: null });
      return;
    }
    clicks = setTimeout(() => { clicks = null; change({ at: positive(moment(from.graph, x)) }); }, 230);
  }, true);
  window.addEventListener("pointercancel", () => { dragging = null; }, true);

  // ---- keys -------------------------------------------------------------------------------------------------

  let steps = null;
  document.addEventListener("keydown", (event) => {
    if (event.target.id === "find" && event.key === "Enter") return search(event.target.value.trim());
    const chart = event.target.closest && event.target.closest(".chart");
    if (!chart || event.metaKey || event.ctrlKey || event.altKey) return;
    const graph = chart.querySelector(".js-plotly-plot");
    if (!graph || !isTime(graph)) return;
    const [low, high] = graph._fullLayout.xaxis.range, width = high - low;
    const query = new URLSearchParams(location.search);
    const here = steps !== null ? steps.x : query.has("at") ? Number(BigInt(query.get("at")) - BigInt(graph.layout.meta.origin)) / 1e9 : (low + high) / 2;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key in moves) {
      const x = Math.min(Math.max(here + (moves[event.key] * width) / 160, low), high);
      if (steps) clearTimeout(steps.timer);
      hairs(null, x);
      steps = { x, timer: setTimeout(() => { steps = null; hairs(null, null); change({ at: positive(moment(graph, x)) }, { push: false }); }, 160) };
    } else if (event.key === "+" || event.key === "=") zoom(graph, here - width / 4, here + width / 4);
    else if (event.key === "-") zoom(graph, Math.max(here - width, 0), here + width);
    else if (event.key === "0" || event.key === "Escape") change({ ...WHOLE, box: null, at: null });
    else if (event.key === "Enter") { const link = document.querySelector('[id*="moment"] a[href^="/pass"]'); if (link) link.focus(); }
    else return;
    event.preventDefault();
  });

  function search(text) {
    if (!text) return;
    if (/^\d{1,15}$/.test(text)) change({ pass: text }, { path: "/pass" });
    else change({ rid: text }, { path: "/request" });
  }

  // ---- buttons ----------------------------------------------------------------------------------------------

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.last !== undefined) change({ from: null, to: null, last: button.dataset.last || null });
    else if (button.dataset.export) save(button);
    else if (button.id === "theme") {
      root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
      localStorage.setItem("theme", root.dataset.theme);
      ask("url");
    } else if (button.id === "copy") {
      const query = new URLSearchParams(location.search);
      if (state.run && !query.has("run")) query.set("run", state.run);
      copy(`${location.origin}${location.pathname}?${query}`).then(() => {
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy link"; }, 1500);
      });
    }
  });

  function copy(text) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    // Only https and this machine have a clipboard.
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    return Promise.resolve();
  }

  // ---- saving -----------------------------------------------------------------------------------------------

  async function save(button) {
    const card = button.closest("figure"), graph = card.querySelector(".js-plotly-plot");
    const title = card.querySelector("h3").textContent, form = button.dataset.export;
    button.closest("details").open = false;
    const name = `${state.run || "schedscope"}-${title.toLowerCase().replace(/[^a-z0-9]+/g, "-")}.${form}`;
    if (form === "csv") {
      const url = URL.createObjectURL(new Blob([table(graph)], { type: "text/csv" }));
      give(url, name);
      setTimeout(() => URL.revokeObjectURL(url), 1000);
      return;
    }
    const margin = graph.layout.margin || {};
    const layout = { ...graph.layout, title: { text: title, font: { size: 15 }, x: 0.01, y: 0.98, yanchor: "top" }, margin: { ...margin, t: (margin.t || 8) + 44 } };
    const size = { width: graph.clientWidth, height: graph.clientHeight + 40 };
    give(await window.Plotly.toImage({ data: graph.data, layout }, { format: form, scale: form === "png" ? 2 : 1, ...size }), name);
  }

  function give(url, name) {
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
  }

  function table(graph) {
    const lines = [["series", "x", "y", "value"]];
    for (const trace of graph.data) {
      if (trace.type === "heatmap") {
        trace.z.forEach((row, j) => row.forEach((value, i) => { if (value !== null) lines.push([trace.name || "requests", place(trace, i), 10 ** trace.y[j], value]); }));
      } else {
        const count = (trace.x || trace.labels || trace.y).length;
        for (let i = 0; i < count; i++) {
          const x = trace.base && trace.orientation === "h" ? trace.base[i] : trace.labels ? trace.labels[i] : place(trace, i);
          const value = trace.orientation === "h" ? trace.x[i] : trace.values ? trace.values[i] : "";
          if (x !== null) lines.push([trace.name || "", x, trace.y ? trace.y[i] : "", value]);
        }
      }
    }
    return lines.map((row) => row.map(cell).join(",")).join("\n") + "\n";
  }

  const place = (trace, i) => (trace.x ? trace.x[i] : trace.x0 + i * trace.dx);

  function cell(value) {
    const text = value === null || value === undefined ? "" : String(value);
    // A spreadsheet takes a text that begins so for a formula.
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n]/.test(safe) ? `"${safe.replace(/"/g, '""')}"` : safe;
  }

  window.dash_clientside = Object.assign({}, window.dash_clientside, { view: { done } });
})();
