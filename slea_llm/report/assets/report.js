"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, main = document.getElementById("main");
  // Columns of a row; see slea_llm/report/dialogues.py.
  const ID = 0, TASK = 1, END = 2, WON = 3, OUTCOME = 4, TURNS = 5, STEPS = 6, REPEATS = 7, CALLS = 8, ERRORS = 9, MEAN = 10, LOW = 11, HARM = 12, DETAIL = 13;
  const PAGE = 200;
  const state = { tab: "overview", set: 0, query: "", end: "", flag: "", sort: "order", down: false, row: null, by: "score", shown: PAGE, evaluator: {}, left: [0, null], right: [data.sets.length > 1 ? 1 : 0, null] };
  let charts = [];

  // ---- small helpers: text from logs only ever becomes text nodes ------------------------------------------------
  function el(name, attributes, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key === "class") node.className = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value === true) node.setAttribute(key, "");
      else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const fixed = (value, digits = 2) => value === null || value === undefined ? "\u2013" : value.toFixed(digits);
  const signed = (value, digits = 2) => value === null || value === undefined ? "\u2013" : (value > 0 ? "+" : value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(digits);
  const percent = (value) => value === null || value === undefined ? "\u2013" : (100 * value).toFixed(1) + " %";
  const count = (value) => value.toLocaleString("en-GB");
  // A value of a header as a reader takes it: no braces, and nothing for what is empty.
  const plain = (value) => value === null || value === undefined ? "" : typeof value !== "object" ? String(value)
    : Object.entries(value).map(([name, one]) => [name, plain(one)]).filter(([, text]) => text)
      .map(([name, text]) => Array.isArray(value) ? text : `${name} ${text}`).join(", ");
  const set = () => data.sets[state.set];
  const endOf = (row) => row[END] === "error" ? "broken" : row[WON] === true ? "success" : row[WON] === false ? "failure" : "unknown";
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  function shade(value, most) {
    if (!value) return "transparent";
    const strength = Math.min(1, Math.abs(value) / (most || 1));
    return `rgba(${colour(value < 0 ? "--bad-rgb" : "--good-rgb")},${(0.08 + 0.62 * strength).toFixed(3)})`;
  }
  function table(heads, rows, options = {}) {
    const head = el("tr", {}, heads.map(([name, numeric, sort]) => el("th", { class: numeric ? "n" : "", scope: "col", "aria-sort": sort && sort === options.sort ? (options.down ? "descending" : "ascending") : null },
      sort ? el("button", { type: "button", onclick: () => options.onsort(sort) }, name + (sort === options.sort ? (options.down ? " \u2193" : " \u2191") : "")) : name)));
    return el("table", {}, el("thead", {}, head), el("tbody", {}, rows));
  }
  const cell = (value, numeric) => el("td", { class: numeric ? "n" : "" }, value);
  function card(value, label) { return el("div", { class: "card" }, el("b", {}, value), el("span", {}, label)); }
  function note(text, warn) { return el("p", { class: warn ? "note warn" : "note" }, text); }

  // ---- charts -----------------------------------------------------------------------------------------------------
  function chart(title, words, config) {
    const canvas = el("canvas", { role: "img", "aria-label": title + ". " + words });
    const figure = el("figure", {}, el("figcaption", {}, title), el("div", { class: "canvas" }, canvas), words ? el("p", {}, words) : null);
    queueMicrotask(() => {
      if (!canvas.isConnected) return;
      const grid = { color: colour("--line") }, ticks = { color: colour("--soft") };
      const axis = (text, more) => ({ grid, ticks, title: { display: !!text, text: text || "", color: colour("--soft") }, ...more });
      charts.push(new Chart(canvas, {
        type: config.type, data: config.data,
        options: { animation: false, responsive: true, maintainAspectRatio: false, parsing: config.parsing,
          interaction: { mode: "index", intersect: false }, elements: { point: { radius: config.points || 0 }, line: { borderWidth: 2 } },
          plugins: { legend: { display: config.data.datasets.length > 1, labels: { color: colour("--fg"), boxWidth: 14 } } },
          scales: { x: axis(config.x, config.xscale), y: axis(config.y, config.yscale) } },
      }));
    });
    return figure;
  }
  const endColours = () => ({ success: colour("--good"), failure: colour("--bad"), unknown: colour("--none") });
  function bars(title, words, histogram, x) {
    const paint = endColours(), ends = Object.keys(histogram.shares).sort().reverse();
    if (!ends.length) return null;
    const labels = histogram.edges.map((edge) => histogram.width > 1 && Number.isInteger(histogram.width) ? `${edge}\u2013${edge + histogram.width - 1}` : String(Math.round(100 * edge) / 100));
    return chart(title, words, { type: "bar", x, y: "share", data: { labels, datasets: ends.map((end) => ({ label: end, data: histogram.shares[end], backgroundColor: paint[end] })) } });
  }
  function plots(one) {
    const paint = endColours(), found = [];
    found.push(bars("Scores of steps", `Share of the steps of ${one.evaluator || "no evaluator"} in each bin, by how the dialogue ended. Lower edges.`, one.plots.scores, "score"));
    const ends = Object.keys(one.plots.by_place).filter((end) => one.plots.by_place[end].some((value) => value !== null)).sort().reverse();
    if (ends.length) found.push(chart("Score along the dialogue", "Mean score of the steps in each tenth of a dialogue.", { type: "line", points: 3, x: "tenth of the dialogue", y: "mean score",
      data: { labels: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], datasets: ends.map((end) => ({ label: end, data: one.plots.by_place[end], borderColor: paint[end], backgroundColor: paint[end], spanGaps: true })) } }));
    found.push(bars("Turns", "Share of the dialogues of each kind. Turns are replies of the agent.", one.plots.turns, "turns"));
    if (one.measures.passes.length) found.push(chart("pass^k and pass@k", "Mean over tasks with at least k trials: all of k succeed, any of k succeeds.", { type: "line", points: 3, x: "k", yscale: { min: 0, max: 1 },
      data: { labels: one.measures.passes.map((row) => row[0]), datasets: [["pass^k", 2, "--bad"], ["pass@k", 3, "--good"]].map(([label, at, paintName]) => ({ label, data: one.measures.passes.map((row) => row[at]), borderColor: colour(paintName), backgroundColor: colour(paintName) })) } }));
    return found;
  }

  // ---- overview ---------------------------------------------------------------------------------------------------
  function overview() {
    const parts = [];
    if (data.sets.length > 1) parts.push(columns());
    const one = set(), m = one.measures;
    parts.push(el("h2", {}, one.name));
    const whole = one.rows.filter((row) => row[DETAIL] !== null).length;
    if (whole < one.total) parts.push(note(`All numbers and plots are of all ${count(one.total)} dialogues. ${count(whole)} of them are shown whole: those to review first, then a draw by task.` + (one.rows.length < one.total ? ` The table lists ${count(one.rows.length)}.` : "")));
    if (m.unknown) parts.push(note(`Of ${count(m.unknown)} dialogues the log does not say how they ended; they are in no rate.`));
    for (const evaluator of one.evaluators) if (evaluator.unscored > 0.2 * (evaluator.scored + evaluator.unscored)) parts.push(note(`${evaluator.name} left ${count(evaluator.unscored)} of ${count(evaluator.scored + evaluator.unscored)} steps without a score, mostly because: ${evaluator.why_not.length ? evaluator.why_not[0][0] : "?"}`, true));
    if (one.trend && one.trend[2]) parts.push(note(`The sum of scores rises with length (rank correlation ${fixed(one.trend[0])} over ${one.trend[1]} dialogues): an agent could earn by talking on.`, true));
    parts.push(el("div", { class: "cards" },
      card(count(m.dialogues), m.broken ? `dialogues, ${count(m.broken)} of them broke` : "dialogues"),
      card(m.finished ? percent(m.successes / m.finished) : "\u2013", m.finished ? `success, ${count(m.successes)} of ${count(m.finished)}; 95 %: ${percent(m.interval[0])} to ${percent(m.interval[1])}` : "success: not known"),
      card(fixed(m.turns_of_successes), `turns of successes (${fixed(m.turns_of_all)} of all)`),
      card(m.turns ? fixed(m.steps / m.turns) : "\u2013", `steps a turn (${count(m.steps)} steps)`),
      card(m.steps ? percent(m.repeats / m.steps) : "\u2013", `of the steps repeat an earlier one (${count(m.repeats)})`),
      card(m.calls ? percent(m.tool_errors / m.calls) : "\u2013", `of ${count(m.calls)} calls met an error`),
      card(count(m.harmed), `failures with a harmful step, ${count(m.unharmed)} without`)));
    if (m.passes.length) parts.push(el("div", { class: "wide" }, table([["k", true], ["tasks", true], ["pass^k", true], ["pass@k", true]], m.passes.map((row) => el("tr", {}, cell(row[0], true), cell(row[1], true), cell(fixed(row[2], 4), true), cell(fixed(row[3], 4), true)))),
      el("p", { class: "muted" }, `${count(m.equal_groups)} of ${count(m.tasks)} tasks ended alike in all their trials: comparing those teaches nothing, and their outcome gives an advantage of 0.`)));
    parts.push(el("div", { class: "charts" }, plots(one)));
    parts.push(el("h3", {}, "Evaluators"), el("div", { class: "wide" }, table([["name"], ["version"], ["scored", true], ["not scored", true], ["mean", true]], one.evaluators.map((evaluator) => el("tr", {}, cell(evaluator.name), cell(evaluator.version), cell(count(evaluator.scored), true), cell(count(evaluator.unscored), true), cell(signed(evaluator.mean, 3), true))))));
    const facts = Object.entries(one.facts).map(([name, value]) => [name, plain(value)]).filter(([, text]) => text);
    parts.push(el("p", { class: "muted" }, `Ends: ${Object.entries(m.terminations).map(([name, n]) => `${name} ${count(n)}`).join(", ")}. ` + facts.map(([name, text]) => `${name}: ${text}`).join("; ") + `. Made ${data.made} by slea ${data.version}.`));
    return parts;
  }
  function columns() {
    const lines = [["dialogues", (m) => count(m.dialogues)], ["success", (m) => m.finished ? `${percent(m.successes / m.finished)} (${percent(m.interval[0])} to ${percent(m.interval[1])})` : "\u2013"], ["turns of successes", (m) => fixed(m.turns_of_successes)], ["turns of all", (m) => fixed(m.turns_of_all)], ["steps a turn", (m) => m.turns ? fixed(m.steps / m.turns) : "\u2013"], ["repeated steps", (m) => m.steps ? percent(m.repeats / m.steps) : "\u2013"], ["calls that met an error", (m) => m.calls ? percent(m.tool_errors / m.calls) : "\u2013"], ["mean score", (m, one) => one.evaluators.map((e) => `${e.name} ${signed(e.mean, 3)}`).join(", ")]];
    return el("div", {}, el("h2", {}, "Both"), table([[""], ...data.sets.map((one) => [one.name, true])], lines.map(([name, of]) => el("tr", {}, cell(name), data.sets.map((one) => cell(of(one.measures, one), true))))));
  }

  // ---- the list of dialogues ----------------------------------------------------------------------------------------
  const texts = new Map();
  function searchText(one, row) {
    const key = `${data.sets.indexOf(one)} ${row[DETAIL]}`;
    if (row[DETAIL] === null) return "";
    if (!texts.has(key)) {
      const detail = one.details[row[DETAIL]], found = [];
      for (const [context, steps] of detail.turns) { for (const message of context) found.push(message[2]); for (const step of steps) { found.push(step[3], step[2]); for (const word of step[4]) if (word) found.push(word[1]); } }
      for (const message of detail.closing) found.push(message[2]);
      texts.set(key, found.join("\n").toLowerCase());
    }
    return texts.get(key);
  }
  const FLAGS = { review: "to review", repeats: "with repeats", errors: "with tool errors", harm: "with a harmful step", whole: "shown whole" };
  const SORTS = { order: null, id: ID, end: END, outcome: OUTCOME, turns: TURNS, steps: STEPS, repeats: REPEATS, errors: ERRORS, mean: MEAN, low: LOW };
  function matching(one) {
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean), review = new Set(one.review.map((entry) => entry[0]));
    const found = one.rows.map((row, at) => at).filter((at) => {
      const row = one.rows[at];
      if (state.end && endOf(row) !== state.end) return false;
      if (state.flag === "review" && !review.has(at)) return false;
      if (state.flag === "repeats" && !row[REPEATS]) return false;
      if (state.flag === "errors" && !row[ERRORS]) return false;
      if (state.flag === "harm" && !row[HARM]) return false;
      if (state.flag === "whole" && row[DETAIL] === null) return false;
      if (!words.length) return true;
      const short = `${row[ID]} ${row[TASK] || ""} ${row[END]}`.toLowerCase();
      return words.every((word) => short.includes(word) || searchText(one, row).includes(word));
    });
    const by = SORTS[state.sort];
    if (by === null) return state.down ? found.reverse() : found;
    const value = (at) => by === END ? endOf(one.rows[at]) : one.rows[at][by];
    return found.sort((a, b) => {
      const left = value(a), right = value(b);
      if (left === right) return a - b;
      if (left === null) return 1;
      if (right === null) return -1;
      return (left < right ? -1 : 1) * (state.down ? -1 : 1);
    });
  }
  function dialogues() {
    const one = set(), list = el("div", { class: "list", id: "list" }), pane = el("div", { class: "pane", id: "pane" }), told = el("span", { class: "muted", role: "status" });
    const refresh = () => {
      const found = matching(one);
      told.textContent = `${count(found.length)} of ${count(one.rows.length)}`;
      if (!found.includes(state.row)) state.row = found.length ? found[0] : null;
      list.replaceChildren(listing(one, found, pane), found.length > state.shown ? el("button", { type: "button", onclick: () => { state.shown += PAGE; refresh(); } }, `Show more (${count(found.length - state.shown)} left)`) : "");
      show(one, pane, state.row);
    };
    const search = el("input", { type: "search", id: "search", placeholder: "Search ids, tasks, texts and reasons ( / )", "aria-label": "Search", value: state.query, oninput: () => { state.query = search.value; state.shown = PAGE; refresh(); } });
    const select = (key, label, choices) => {
      const node = el("select", { id: "filter-" + key, onchange: () => { state[key] = node.value; state.shown = PAGE; refresh(); } }, el("option", { value: "" }, label), Object.entries(choices).map(([value, name]) => el("option", { value, selected: state[key] === value }, name)));
      return node;
    };
    const bar = el("div", { class: "bar" }, search, select("end", "all ends", { success: "success", failure: "failure", unknown: "unknown", broken: "broken" }), select("flag", "all dialogues", FLAGS), told);
    dialogues.refresh = refresh;
    dialogues.step = (by) => {
      const found = matching(one), at = found.indexOf(state.row) + by;
      if (at < 0 || at >= found.length) return;
      if (at >= state.shown) state.shown += PAGE;
      state.row = found[at]; refresh();
      const marked = list.querySelector("tr.at"); if (marked) marked.scrollIntoView({ block: "nearest" });
    };
    refresh();
    return [bar, el("div", { class: "split" }, list, pane)];
  }
  function listing(one, found, pane) {
    const onsort = (key) => { state.down = state.sort === key ? !state.down : ["mean", "low", "id", "end"].indexOf(key) < 0; state.sort = key; dialogues.refresh(); };
    const rows = found.slice(0, state.shown).map((at) => {
      const row = one.rows[at];
      const pick = () => { state.row = at; for (const other of pane.parentNode.querySelectorAll("tr.at")) other.classList.remove("at"); line.classList.add("at"); show(one, pane, at); };
      const line = el("tr", { class: "pick" + (at === state.row ? " at" : ""), tabindex: "0", onclick: pick, onkeydown: (event) => { if (event.key === "Enter") pick(); } },
        el("td", {}, row[ID], row[TASK] && !row[ID].startsWith(row[TASK].split("/").pop()) ? el("div", { class: "muted" }, row[TASK]) : null), el("td", {}, el("span", { class: "tag " + endOf(row) }, endOf(row) === "failure" ? row[END] : endOf(row))),
        cell(row[TURNS], true), cell(row[STEPS], true), cell(row[REPEATS] || "", true), cell(row[ERRORS] || "", true), cell(signed(row[MEAN]), true), cell(signed(row[LOW]), true));
      return line;
    });
    return table([["dialogue", false, "id"], ["end", false, "end"], ["turns", true, "turns"], ["steps", true, "steps"], ["rep.", true, "repeats"], ["err.", true, "errors"], ["mean", true, "mean"], ["lowest", true, "low"]], rows, { sort: state.sort, down: state.down, onsort });
  }

  // ---- one dialogue ---------------------------------------------------------------------------------------------------
  const evaluatorAt = (one) => { const name = state.evaluator[data.sets.indexOf(one)] || one.evaluator; return Math.max(0, one.evaluators.findIndex((e) => e.name === name)); };
  const numberOf = (one, step) => state.by === "advantage" ? step[5] : (step[4][evaluatorAt(one)] || [null])[0];
  function show(one, pane, at, simple) {
    if (at === null || at === undefined) { pane.replaceChildren(el("p", { class: "muted" }, "No dialogue.")); return; }
    const row = one.rows[at], detail = row[DETAIL] === null ? null : one.details[row[DETAIL]], parts = [];
    parts.push(el("h3", {}, row[ID]), el("p", {}, el("span", { class: "tag " + endOf(row) }, row[END]), row[TASK] ? el("span", { class: "tag" }, row[TASK]) : null, row[OUTCOME] === null ? null : el("span", { class: "tag" }, `outcome ${row[OUTCOME]}`), el("span", { class: "tag" }, `mean score ${signed(row[MEAN])}`), row[HARM] ? el("span", { class: "tag warn" }, `first harm: turn ${row[HARM][0]}, step ${row[HARM][1]}`) : null));
    for (const [place, , reasons] of one.review) if (place === at) parts.push(note(reasons.map((reason) => reason[1]).join("; ")));
    if (!detail) { parts.push(note("The steps of this dialogue are not in the report, which has room for some only. `slea report --dialogues` or a log of fewer dialogues shows more.")); pane.replaceChildren(...parts); return; }
    const hasAdvantage = detail.turns.some((turn) => turn[1].some((step) => step[5] !== undefined && step[5] !== null));
    if (!simple) parts.push(el("div", { class: "bar" }, chooser(one, pane, at), hasAdvantage ? el("button", { type: "button", onclick: () => { toggleBy(); } }, `Coloured by ${state.by} (a)`) : null, el("button", { type: "button", onclick: () => sendToSide(at) }, "Side by side (c)")));
    if (!hasAdvantage && detail.no_credit) parts.push(el("p", { class: "muted" }, `No advantages: ${detail.no_credit}`));
    const steps = detail.turns.flatMap((turn) => turn[1]), most = Math.max(1e-9, ...steps.map((step) => Math.abs(numberOf(one, step) || 0)));
    const nodes = [], strip = el("div", { class: "strip", role: "group", "aria-label": "Steps by " + state.by });
    for (const [context, turnSteps, reward, finish, index] of detail.turns) {
      const turn = el("div", { class: "turn" }, context.map((message) => said(message)), el("div", { class: "label" }, `turn ${index}` + (reward ? `, reward ${reward}` : "") + (finish !== "stop" ? `, ended by ${finish}` : "")));
      for (const step of turnSteps) {
        const node = stepNode(one, step, most, row[HARM] && row[HARM][0] === index && row[HARM][1] === step[0]);
        turn.append(node);
        const value = numberOf(one, step), cellNode = el("button", { type: "button", title: `turn ${index}, step ${step[0]}: ${signed(value)}`, "aria-label": `turn ${index}, step ${step[0]}, ${state.by} ${signed(value)}`, onclick: () => jump(node) });
        cellNode.style.backgroundColor = shade(value, most);
        strip.append(cellNode);
      }
      nodes.push(turn);
    }
    if (detail.closing.length) nodes.push(el("div", { class: "turn" }, el("div", { class: "label" }, "after the last reply"), detail.closing.map((message) => said(message))));
    if (detail.error) nodes.push(note(detail.error, true));
    pane.replaceChildren(...parts, strip, ...nodes);
  }
  function chooser(one, pane, at) {
    if (one.evaluators.length < 2) return el("span", { class: "muted" }, one.evaluators.length ? one.evaluators[0].name : "no evaluator");
    const node = el("select", { "aria-label": "Evaluator", onchange: () => { state.evaluator[data.sets.indexOf(one)] = node.value; show(one, pane, at); } }, one.evaluators.map((evaluator, place) => el("option", { value: evaluator.name, selected: place === evaluatorAt(one) }, evaluator.name)));
    return node;
  }
  function said([role, name, text]) {
    const lines = text.split("\n").length, long = text.length > 500 || lines > 8, head = el("span", { class: "role" }, role + (name ? ` ${name}` : "") + ": ");
    if (!long) return el("div", { class: "message" }, head, el("span", { class: "text" }, marked(text)));
    return el("details", { class: "message", open: role !== "system" && text.length < 1200 }, el("summary", {}, head, text.slice(0, 120).replace(/\s+/g, " ") + "\u2026"), el("div", { class: "text" }, marked(text)));
  }
  function marked(text) {
    const word = state.query.trim().toLowerCase();
    if (state.tab !== "dialogues" || word.length < 2) return [text];
    const parts = [], low = text.toLowerCase();
    if (low.length !== text.length) return [text];
    let from = 0;
    for (let at = low.indexOf(word); at >= 0 && parts.length < 400; at = low.indexOf(word, from)) { parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + word.length))); from = at + word.length; }
    parts.push(text.slice(from));
    return parts;
  }
  function stepNode(one, step, most, harm) {
    const [index, , act, text, words, advantage, rewards] = step, value = numberOf(one, step);
    const why = el("div", { class: "why" });
    words.forEach((word, place) => { if (word) why.append(el("div", {}, el("b", { class: word[0] === null ? "muted" : word[0] < 0 ? "bad" : word[0] > 0 ? "good" : "" }, word[0] === null ? "no score" : signed(word[0])), ` ${one.evaluators[place].name}: ${word[1] || "(no reason given)"}`)); });
    if (advantage !== undefined && advantage !== null) why.append(el("div", { class: "muted" }, `advantage ${signed(advantage)}` + (Object.keys(rewards).length ? "; earned " + Object.entries(rewards).map(([name, number]) => `${name} ${signed(number)}`).join(", ") : "")));
    const node = el("div", { class: "step" + (harm ? " harm" : ""), tabindex: "-1" }, el("div", { class: "kind" }, `step ${index}, ${act}` + (harm ? ", first harmful step" : "")), el("div", { class: "text" }, marked(text)), why);
    node.dataset.value = value === null || value === undefined ? "" : String(value);
    node.style.backgroundColor = shade(value, 2.2 * most);
    if (value) node.style.borderLeftColor = shade(value, most);
    return node;
  }
  function jump(node) { for (const other of main.querySelectorAll(".step.at")) other.classList.remove("at"); node.classList.add("at"); node.scrollIntoView({ block: "center" }); node.focus({ preventScroll: true }); }
  function nextHarm(by) {
    const every = [...main.querySelectorAll(".step")], low = every.filter((node) => node.dataset.value !== "" && Number(node.dataset.value) < 0), at = every.findIndex((node) => node.classList.contains("at"));
    const next = by > 0 ? low.find((node) => every.indexOf(node) > at) : low.reverse().find((node) => at < 0 || every.indexOf(node) < at);
    if (next) jump(next);
  }
  function toggleBy() { state.by = state.by === "score" ? "advantage" : "score"; render(); }
  function open(setAt, at, place) { state.set = setAt; state.row = at; state.query = ""; state.end = ""; state.flag = ""; state.tab = "dialogues"; render(); if (place) { const detail = set().rows[at][DETAIL]; if (detail !== null) { let number = 0; for (const [, steps, , , turn] of set().details[detail].turns) for (const step of steps) { if (turn === place[0] && step[0] === place[1]) jump(main.querySelectorAll(".pane .step")[number]); number += 1; } } } }
  const link = (text, at, place) => at === null || at < 0 ? text : el("button", { type: "button", onclick: () => open(state.set, at, place) }, text);

  // ---- failures, patterns, review -------------------------------------------------------------------------------------
  function failures() {
    const one = set(), m = one.measures;
    const rows = one.harms.map(([at, turn, step, act, score, text, why]) => el("tr", {}, el("td", {}, link(at < 0 ? "(not listed)" : one.rows[at][ID], at, [turn, step])), cell(`${turn}.${step}`, true), cell(act), cell(signed(score), true), el("td", { class: "text" }, text), cell(why)));
    return [el("h2", {}, "Failures and their first harmful step"), note(`A step does harm when it scored below 0 and at most half of the lowest score of its dialogue (by ${one.evaluator || "no evaluator"}). ${count(m.harmed)} failures have one, ${count(m.unharmed)} have none` + (m.harmed > one.harms.length ? `; the first ${one.harms.length} are listed.` : ".")),
      one.harm_acts.length ? el("p", {}, "They are, by what the step does: ", one.harm_acts.map(([name, n]) => `${name} ${count(n)}`).join(", ")) : null,
      el("div", { class: "wide" }, table([["dialogue"], ["turn.step", true], ["does"], ["score", true], ["step"], ["why"]], rows))];
  }
  const patternSort = {};
  function patterns() {
    const one = set(), parts = [el("h2", {}, "Which steps score high, and which low"), note(`Scores of ${one.evaluator || "no evaluator"}. The share of successes is that of the dialogues that hold such a step.` + (one.patterns_left_out ? ` ${count(one.patterns_left_out)} steps with rare patterns are left out.` : ""))];
    for (const [key, title] of [["act", "By what the step does"], ["tool", "By the tool that is called"], ["reason", "By the reason given"]]) {
      if (!one.patterns[key].length) continue;
      const sort = patternSort[key] || { by: 2, down: true }, rows = [...one.patterns[key]].sort((a, b) => (a[sort.by] === b[sort.by] ? 0 : a[sort.by] === null ? 1 : b[sort.by] === null ? -1 : (a[sort.by] < b[sort.by] ? -1 : 1) * (sort.down ? -1 : 1)));
      const onsort = (by) => { patternSort[key] = { by, down: sort.by === by ? !sort.down : by !== 0 }; render(); };
      const lines = rows.map(([name, n, mean, error, won, advantage, example]) => { const line = el("tr", {}, cell(name), cell(count(n), true), cell(signed(mean) + (error === null ? "" : ` \u00b1 ${fixed(error)}`), true), cell(percent(won), true), cell(signed(advantage), true), el("td", {}, example ? link("example", example[0], [example[1], example[2]]) : "")); line.children[2].style.backgroundColor = shade(mean, 1); return line; });
      parts.push(el("h3", {}, title), el("div", { class: "wide" }, table([["pattern", false, 0], ["steps", true, 1], ["mean score", true, 2], ["successes", true, 4], ["advantage", true, 5], [""]].map(([name, numeric, by]) => [name, numeric, by === undefined ? null : String(by)]), lines, { sort: String(sort.by), down: sort.down, onsort: (by) => onsort(Number(by)) })));
    }
    return parts;
  }
  function review() {
    const one = set();
    return [el("h2", {}, "To be read first"), note("Dialogues whose scores and ends do not go together, that repeat themselves, or whose scores rise with length. A shortcut found here can be given a score by hand: see labels and overrides in the guide to scoring."),
      el("div", { class: "wide" }, table([["dialogue"], ["end"], ["steps", true], ["mean score", true], ["why"], [""]], one.review.map(([at, , reasons]) => { const row = one.rows[at]; return el("tr", {}, el("td", {}, link(row[ID], at)), el("td", {}, el("span", { class: "tag " + endOf(row) }, row[END])), cell(row[STEPS], true), cell(signed(row[MEAN]), true), el("td", {}, reasons.map((reason) => el("div", {}, el("span", { class: "tag warn" }, reason[0]), reason[1]))), el("td", {}, el("button", { type: "button", onclick: () => { sendToSide(at); } }, "side by side"))); })))];
  }

  // ---- side by side ---------------------------------------------------------------------------------------------------
  function partner(at) {
    const here = state.left[0], there = state.right[0], row = data.sets[here].rows[at], rows = data.sets[there].rows;
    const fits = (other) => here !== there || other !== at;
    let found = rows.findIndex((other, place) => fits(place) && other[ID] === row[ID]);
    if (found < 0 && row[TASK]) found = rows.findIndex((other, place) => fits(place) && other[TASK] === row[TASK] && other[DETAIL] !== null && (here !== there || other[WON] !== row[WON]));
    if (found < 0 && row[TASK]) found = rows.findIndex((other, place) => fits(place) && other[TASK] === row[TASK]);
    return found < 0 ? null : found;
  }
  function sendToSide(at) { state.left = [state.set, at]; if (data.sets.length > 1) state.right[0] = 1 - state.set; state.right = [state.right[0], partner(at)]; state.tab = "side"; render(); }
  function side() {
    for (const half of [state.left, state.right]) if (half[1] === null) { const rows = data.sets[half[0]].rows, first = rows.findIndex((row) => row[DETAIL] !== null); half[1] = first < 0 ? null : first; if (half === state.left && state.right[1] === null && first >= 0) state.right[1] = partner(first); }
    const half = (key) => {
      const [at, row] = state[key], one = data.sets[at], pane = el("div", { class: "pane" });
      const which = el("select", { "aria-label": "Run", onchange: () => { state[key] = [Number(which.value), null]; render(); } }, data.sets.map((other, place) => el("option", { value: place, selected: place === at }, other.name)));
      const many = one.rows.map((other, place) => place).filter((place) => one.rows[place][DETAIL] !== null || place === row);
      const pick = el("select", { "aria-label": "Dialogue", id: "pick-" + key, onchange: () => { state[key][1] = Number(pick.value); if (key === "left") { const other = partner(Number(pick.value)); if (other !== null) state.right[1] = other; } render(); } }, many.map((place) => el("option", { value: place, selected: place === row }, `${one.rows[place][ID]} (${one.rows[place][END]})`)));
      show(one, pane, row, true);
      pane.prepend(el("div", { class: "bar" }, data.sets.length > 1 ? which : null, pick));
      return pane;
    };
    return [el("h2", {}, "Side by side"), el("p", { class: "muted" }, "A choice on the left brings the same dialogue of the other run, or another trial of the task that ended otherwise, to the right."), el("div", { class: "side", id: "side" }, half("left"), half("right"))];
  }

  // ---- training ---------------------------------------------------------------------------------------------------------
  const GROUPS = [["Success and outcome", ["episodes/success", "episodes/outcome"]], ["Turns", ["episodes/turns"]], ["Tokens", ["episodes/tokens"]], ["KL of the updates", ["update/kl", "update/kl_max"]], ["KL to the reference", ["reference_kl/k1", "reference_kl/k3"]], ["Entropy", ["entropy/entropy"]], ["Clipped share", ["ppo/clip_frac"]], ["Gradient norms", ["grad_norm/policy", "grad_norm/critic"]], ["Sampler against trainer", ["sampler/gap_mean"]]];
  const PALETTE = ["#2f7fc1", "#d9742b", "#4d9e61", "#9b6bc7", "#c94f6d", "#6f7d8c", "#b59a2c", "#2aa3a3"];
  function curve(title, words, held, names) {
    const shown = names.filter((name) => held.curves[name]);
    return shown.length ? chart(title, words, { type: "line", parsing: false, points: held.iterations < 40 ? 2 : 0, x: "iteration", xscale: { type: "linear" }, data: { datasets: shown.map((name, at) => ({ label: name, data: held.curves[name].map(([x, y]) => ({ x, y })), borderColor: PALETTE[at % PALETTE.length], backgroundColor: PALETTE[at % PALETTE.length] })) } }) : null;
  }
  function training() {
    const held = set().training, names = Object.keys(held.curves), starting = (prefix) => names.filter((name) => name.startsWith(prefix));
    const parts = [el("h2", {}, `Training: ${held.iterations} iterations`)];
    parts.push(held.alarms.length ? el("div", {}, el("h3", {}, "Alarms"), table([["first in", true], ["alarm"], ["what it means, and what mends it"]], held.alarms.map(([metric, at, what]) => el("tr", {}, cell(at, true), cell(metric), cell(what))))) : note("No alarm was raised."));
    if (held.evaluations.length) parts.push(el("h3", {}, "Evaluations"), table([["when"], ["policy", true], ["success", true], ["95 %", true], ["turns", true]], held.evaluations.map((row) => el("tr", {}, cell(row.moment === null ? "" : String(row.moment)), cell(row.policy_version, true), cell(`${row.successes}/${row.n} = ${percent(row.success_rate)}`, true), cell(row.interval ? `${percent(row.interval[0])} to ${percent(row.interval[1])}` : "", true), cell(fixed(row.mean_turns), true)))));
    parts.push(el("h3", {}, "Curves"), el("div", { class: "charts" }, GROUPS.map(([title, of]) => curve(title, "", held, of)),
      curve("Where the rewards came from", "Share of the sum of absolute rewards that each part paid.", held, starting("credit/share/")),
      curve("Explained variance", "1 - Var(target - value) / Var(target) of every stream's head.", held, names.filter((name) => name.endsWith("/explained_variance"))),
      curve("Steps without a score", "Share by evaluator.", held, starting("credit/unscored/")), curve("Seconds by phase", "", held, starting("seconds/"))));
    const pick = el("select", { "aria-label": "Metric", onchange: () => { extra.replaceChildren(curve(pick.value, "", held, [pick.value])); } }, names.map((name) => el("option", { value: name }, name))), extra = el("div", {});
    if (names.length) { extra.append(curve(names[0], "", held, [names[0]])); parts.push(el("h3", {}, "Any metric"), el("div", { class: "bar" }, pick), extra); }
    return parts;
  }

  // ---- frame --------------------------------------------------------------------------------------------------------------
  const TABS = [["overview", "Overview", overview], ["dialogues", "Dialogues", dialogues], ["failures", "Failures", failures], ["patterns", "Patterns", patterns], ["review", "Review queue", review], ["side", "Side by side", side], ["training", "Training", training]];
  const tabs = () => TABS.filter(([name]) => name === "training" ? !!set().training : name === "overview" || set().total > 0 || data.sets.some((one) => one.total > 0));
  function render() {
    for (const one of charts) one.destroy();
    charts = [];
    if (!tabs().some(([name]) => name === state.tab)) state.tab = "overview";
    document.getElementById("tabs").replaceChildren(...tabs().map(([name, title], at) => el("button", { type: "button", role: "tab", id: "tab-" + name, "aria-selected": String(name === state.tab), "aria-controls": "main", tabindex: name === state.tab ? "0" : "-1", title: `${title} (${at + 1})`, onclick: () => { state.tab = name; render(); } }, title)));
    main.setAttribute("aria-labelledby", "tab-" + state.tab);
    main.replaceChildren(...tabs().find(([name]) => name === state.tab)[2]().flat().filter((part) => part !== null));
  }
  function theme(name) { root.dataset.theme = name; document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark"; }
  const choice = document.getElementById("set");
  choice.append(...data.sets.map((one, at) => el("option", { value: at }, one.name)));
  choice.addEventListener("change", () => { state.set = Number(choice.value); state.row = null; render(); });
  document.getElementById("set-choice").hidden = data.sets.length < 2;
  document.getElementById("theme").addEventListener("click", () => { theme(root.dataset.theme === "dark" ? "light" : "dark"); render(); });
  document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing) { if (event.key === "Escape") event.target.blur(); return; }
    if (document.getElementById("keys").open) return;
    const number = Number(event.key), shown = tabs();
    if (number >= 1 && number <= shown.length) { state.tab = shown[number - 1][0]; render(); document.getElementById("tab-" + state.tab).focus(); }
    else if (event.key === "/") { event.preventDefault(); if (state.tab !== "dialogues") { state.tab = "dialogues"; render(); } document.getElementById("search").focus(); }
    else if (event.key === "j" || event.key === "k") { if (state.tab !== "dialogues") { state.tab = "dialogues"; render(); } else dialogues.step(event.key === "j" ? 1 : -1); }
    else if (event.key === "n" || event.key === "p") nextHarm(event.key === "n" ? 1 : -1);
    else if (event.key === "c" && state.tab === "dialogues" && state.row !== null) sendToSide(state.row);
    else if (event.key === "a") toggleBy();
    else if (event.key === "t") document.getElementById("theme").click();
    else if (event.key === "?") document.getElementById("keys").showModal();
    else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && event.target.getAttribute("role") === "tab") { const at = shown.findIndex(([name]) => name === state.tab), to = (at + (event.key === "ArrowRight" ? 1 : shown.length - 1)) % shown.length; state.tab = shown[to][0]; render(); document.getElementById("tab-" + state.tab).focus(); }
  });
  theme(window.matchMedia && window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (data.sets.length === 1 && set().total === 0 && set().training) state.tab = "training";
  render();
})();
