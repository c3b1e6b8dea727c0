// Draws the draft explorer from the JSON beside it. All text goes into the page by
// textContent, and no markup is made of data.
"use strict";
(() => {
  const source = document.getElementById("texts");
  if (!source) return;
  const texts = JSON.parse(source.textContent);
  const byId = (id) => document.getElementById(id);
  const [select, slider, play] = [byId("text"), byId("step"), byId("play")];
  const state = { text: 0, trace: 0, step: 0 };
  let timer = null;

  const SVG = "http://www.w3.org/2000/svg";
  const fill = (node, attributes, children) => {
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children.filter((child) => child !== null));
    return node;
  };
  const html = (tag, attributes = {}, ...children) =>
    fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS(SVG, tag), attributes, children);

  // A token on one line: its white space as signs.
  const visible = (piece) =>
    piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
  const number = (value) => value.toFixed(2).replace("-", "−");

  const current = () => {
    const text = texts[state.text];
    const trace = text.traces[state.trace];
    return { text, trace, call: trace.calls[state.step] };
  };

  // What a call proposed at one place of its block: row in the lattice, or -1.
  const rowOf = (text, at, place, token) =>
    place === 0 ? (token === text.output[at] ? 0 : -1)
      : (text.candidates[at]?.[place - 1] ?? []).indexOf(token);
  const scoreOf = (text, at, place, token) => {
    const row = rowOf(text, at, place, token);
    return place === 0 || row < 0 ? null : text.log_probs[at][place - 1][row];
  };

  const chips = (text, call, tokens, accepted) => {
    const line = html("p", { class: "draft" });
    tokens.forEach((token, place) => {
      const piece = html("bdi", {}, visible(text.pieces[token]));
      const kind = place < accepted ? "ins" : "del";
      line.append(html(kind, place === 0 ? { class: "certain" } : {}, piece));
    });
    return line;
  };

  const draftPanel = ({ text, call }) => {
    const { at, winner, draft, accepted, rank } = call;
    const next = text.output[at + accepted];
    const panel = html("div", { class: "drafted" },
      html("h4", {}, rank ? `Draft ${rank + 1}, the winner` : "Draft"),
      chips(text, call, winner, accepted));
    if (rank && draft.length) {
      let same = 1;
      while (same < draft.length && draft[same] === text.output[at + same]) same += 1;
      panel.append(html("h4", {}, "Draft 1, with the best score"),
        chips(text, call, draft, Math.min(same, draft.length)));
    }
    const corrected = accepted < winner.length && next !== undefined;
    panel.append(html("p", { class: "says" },
      `${accepted} of ${winner.length} tokens accepted`,
      corrected ? "; the model’s next token is " : ".",
      corrected ? html("ins", { class: "certain" },
        html("bdi", {}, visible(text.pieces[next]))) : null));
    return panel;
  };

  const textPanel = ({ text, trace }) => {
    const box = html("pre", { class: "text", tabindex: "0", "aria-label": "Text so far" },
      html("span", { class: "given" }, text.prompt));
    trace.calls.slice(0, state.step + 1).forEach(({ at, accepted }, index) => {
      const tokens = text.output.slice(at, at + accepted);
      const words = tokens.map((token) => text.pieces[token]).join("");
      box.append(html("mark", index === state.step ? { class: "lit" } : {}, words));
    });
    return box;
  };

  const words = (column) => ([0, 4, 6].includes(column) ? { class: "words" } : {});
  const scores = ({ text, call }) => {
    const { at, winner, accepted } = call;
    let sum = 0;
    const rows = winner.map((token, place) => {
      const score = scoreOf(text, at, place, token);
      const row = rowOf(text, at, place, token);
      sum = sum === null || (place && score === null) ? null : sum + (score ?? 0);
      const truth = text.output[at + place];
      const wanted = truth === undefined ? null : scoreOf(text, at, place, truth);
      const verdict = place === 0 ? "certain" : place < accepted ? "accepted" : "rejected";
      const outside = place && truth !== undefined && wanted === null;
      const cells = [
        html("bdi", { class: "token" }, visible(text.pieces[token])),
        place === 0 ? "" : row < 0 ? "none" : String(row + 1),
        score === null ? "" : number(score),
        place === 0 || sum === null ? "" : number(sum),
        truth === undefined ? "" : html("bdi", { class: "token" }, visible(text.pieces[truth])),
        wanted === null ? (outside ? "absent" : "") : number(wanted),
        verdict,
      ];
      return html("tr", { class: verdict },
        html("th", { scope: "row", class: "name" }, String(place + 1)),
        ...cells.map((cell, index) => html("td", words(index), cell)));
    });
    // Tokens are left-aligned, numbers right-aligned.
    const names = ["Head", "Drafted", "Rank", "log p", "Sum", "Text", "log p", ""];
    return html("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Scores of the draft" },
      html("table", { class: "data scores" },
        html("thead", {}, html("tr", {}, ...names.map((name, index) =>
          html("th", { scope: "col", ...(index ? words(index - 1) : { class: "name" }) }, name)))),
        html("tbody", {}, ...rows)));
  };

  // The lattice: a column per head, a row per candidate, two paths through it.
  const [W, H, GX, GY, TOP] = [110, 25, 22, 6, 30];
  const lattice = ({ text, call }) => {
    const { at, winner, accepted } = call;
    const columns = [[text.output[at]], ...(text.candidates[at] ?? [])];
    const truth = columns.map((_, place) => text.output[at + place]);
    const rows = columns.map((column, place) => {
      const row = truth[place] === undefined ? null : column.indexOf(truth[place]);
      return row === -1 ? column.length : row;
    });
    const depth = Math.max(...columns.map((c) => c.length), ...rows.map((row) => (row ?? 0) + 1));
    const [width, height] = [columns.length * (W + GX) - GX + 4, TOP + depth * (H + GY)];
    const middle = (row) => TOP + row * (H + GY) + H / 2;
    const link = (place, from, to) => {
      const [x0, x1, y0, y1] = [place * (W + GX) + W, (place + 1) * (W + GX), middle(from), middle(to)];
      const half = (x0 + x1) / 2;
      return `M${x0} ${y0}C${half} ${y0} ${half} ${y1} ${x1} ${y1}`;
    };
    const picture = svg("svg", { viewBox: `-2 0 ${width} ${height}`, width, role: "img",
      style: `min-width:${Math.round(0.85 * width)}px;max-width:${width}px`,
      "aria-label": `Lattice of ${columns.length} heads; ${accepted} of ${winner.length} drafted tokens accepted` });
    for (let place = 0; place + 1 < columns.length; place += 1)
      if (rows[place] !== null && rows[place + 1] !== null)
        picture.append(svg("path", { class: "road", d: link(place, rows[place], rows[place + 1]) }));
    for (let place = 0; place + 1 < winner.length; place += 1) {
      const [from, to] = [0, 1].map((more) => rowOf(text, at, place + more, winner[place + more]));
      if (from >= 0 && to >= 0)
        picture.append(svg("path", { class: place + 1 < accepted ? "path kept" : "path rejected",
          d: link(place, from, to) }));
    }
    const node = (place, row, token, logProb) => {
      const [x, y] = [place * (W + GX), TOP + row * (H + GY)];
      const shown = visible(text.pieces[token]);
      const short = [...shown].length > 9 ? [...shown].slice(0, 8).join("") + "…" : shown;
      const drafted = winner[place] === token;
      const classes = ["node",
        truth[place] === token ? "greedy" : "",
        drafted ? (place < accepted ? "kept" : "lost") : "",
        logProb === undefined ? "outside" : ""];
      const weight = logProb === undefined ? 0 : 0.04 + 0.5 * Math.exp(logProb / 2);
      const box = { x, y, width: W, height: H, rx: 6 };
      const note = place === 0 ? "certain" : logProb === undefined ? "absent" : number(logProb);
      picture.append(svg("g", { class: classes.join(" ").trim() },
        svg("title", {}, logProb === undefined
          ? `${shown}: the text has it, but no candidate is it`
          : place ? `${shown}: log-probability ${number(logProb)}, probability ${Math.exp(logProb).toPrecision(3)}`
            : `${shown}: the model’s own next token`),
        svg("rect", { class: "plate", ...box }),
        svg("rect", { ...box, style: `--weight:${weight.toFixed(3)}` }),
        svg("text", { class: "mono", x: x + 8, y: y + 16.5 }, short),
        svg("text", { class: "soft", x: x + W - 7, y: y + 16.5, "text-anchor": "end" }, note)));
    };
    columns.forEach((column, place) => {
      picture.append(svg("text", { class: "soft", x: place * (W + GX) + W / 2, y: 16, "text-anchor": "middle" },
        `head ${place + 1}`));
      column.forEach((token, row) =>
        node(place, row, token, place ? text.log_probs[at][place - 1][row] : 0));
      if (rows[place] === column.length) node(place, column.length, truth[place], undefined);
    });
    return html("figure", { class: "lattice" },
      html("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Lattice, scrolls sideways" }, picture));
  };

  // One bar per call, as high as the tokens that it yielded.
  const strip = ({ text, trace }) => {
    const most = Math.max(...trace.calls.map((call) => call.winner.length));
    const box = byId("strip");
    box.setAttribute("viewBox", `0 0 ${trace.calls.length} ${most}`);
    box.style.maxWidth = `${2 * trace.calls.length}rem`;
    box.setAttribute("aria-label",
      `Tokens of every serial call: ${trace.calls.map((call) => call.accepted).join(", ")}`);
    box.replaceChildren(...trace.calls.map(({ accepted }, index) =>
      svg("rect", { x: index + 0.08, y: most - accepted, width: 0.84, height: accepted,
        class: index === state.step ? "now" : index < state.step ? "past" : "" })));
  };

  const contenders = ({ text }) => {
    byId("contenders").replaceChildren(...text.traces.map((trace, index) =>
      html("label", {},
        html("input", { type: "radio", name: "contender", value: String(index),
          ...(index === state.trace ? { checked: "" } : {}) }),
        html("span", {}, trace.label))));
  };

  const draw = () => {
    const shown = current();
    const { text, trace, call } = shown;
    const calls = trace.calls.length;
    slider.max = String(calls);
    slider.value = String(state.step + 1);
    // A `disabled` button would lose the focus, and with it the arrow keys.
    const end = (name, reached) => byId(name).setAttribute("aria-disabled", String(reached));
    for (const name of ["first", "previous"]) end(name, state.step === 0);
    for (const name of ["last", "next"]) end(name, state.step === calls - 1);
    const tokens = trace.calls.reduce((sum, { accepted }) => sum + accepted, 0);
    byId("where").replaceChildren(
      html("b", {}, `Call ${state.step + 1} of ${calls}`),
      ` · token ${call.at + 1} of ${text.output.length} · complete text: ${(tokens / calls).toFixed(2)} tokens per call`);
    const prompt = textPanel(shown);
    byId("call").replaceChildren(
      html("div", { class: "sides" }, draftPanel(shown), prompt),
      // Some texts have no lattices.
      ...(text.candidates.length ? [
        html("h4", {}, "Lattice ", html("small", {}, "log-probabilities of every head, in nats")),
        key(), lattice(shown), html("h4", {}, "Scores"), scores(shown)] : []));
    prompt.scrollTop = prompt.scrollHeight;
    strip(shown);
  };

  const key = () => {
    const sign = (...shapes) => svg("svg", { width: 40, height: 18, "aria-hidden": "true" }, ...shapes);
    const item = (picture, words) => html("li", {}, picture, html("span", {}, words));
    return html("ul", { class: "legend", "aria-label": "Legend" },
      item(sign(svg("path", { class: "road", d: "M0 9H40" })), "the text"),
      item(sign(svg("path", { class: "path kept", d: "M0 9H40" })), "drafted and accepted"),
      item(sign(svg("path", { class: "path rejected", d: "M0 9H40" })), "drafted and rejected"));
  };

  const address = () => {
    const { text, trace } = current();
    const parts = [...text.key.split("/"), trace.contender, String(state.step + 1)];
    return `#explore=${parts.map(encodeURIComponent).join("/")}`;
  };
  const show = (changes) => {
    Object.assign(state, changes);
    const { trace } = current();
    state.step = Math.min(Math.max(state.step, 0), trace.calls.length - 1);
    draw();
    history.replaceState(null, "", address());
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  const move = (step) => {
    stop();
    show({ step });
  };

  // #explore=task/example/contender/step; what it does not find stays as it was.
  const readAddress = () => {
    if (!location.hash.startsWith("#explore=")) return false;
    let parts = [];
    try {
      parts = location.hash.slice("#explore=".length).split("/").map(decodeURIComponent);
    } catch {
      return false;
    }
    const text = texts.findIndex(({ key }) => key === parts.slice(0, -2).join("/"));
    if (text < 0) return false;
    const trace = texts[text].traces.findIndex(({ contender }) => contender === parts.at(-2));
    state.text = text;
    state.trace = Math.max(trace, 0);
    const last = texts[text].traces[state.trace].calls.length - 1;
    state.step = Math.min(Math.max((parseInt(parts.at(-1), 10) || 1) - 1, 0), last);
    select.value = String(text);
    return true;
  };
  const start = () => {
    stop();
    const found = readAddress();
    contenders(current());
    draw();
    if (found) byId("explorer").scrollIntoView();
  };

  select.addEventListener("change", () => {
    // The same method, where the other text has it.
    const { contender } = current().trace;
    const chosen = Number(select.value);
    const trace = texts[chosen].traces.findIndex((other) => other.contender === contender);
    stop();
    show({ text: chosen, trace: Math.max(trace, 0), step: 0 });
    contenders(current());
  });
  byId("contenders").addEventListener("change", ({ target }) => {
    stop();
    // The call that covers the same place of the text.
    const { at } = current().call;
    const trace = Number(target.value);
    const { calls } = texts[state.text].traces[trace];
    show({ trace, step: calls.findLastIndex((call) => call.at <= at) });
  });
  slider.addEventListener("input", () => move(Number(slider.value) - 1));
  byId("first").addEventListener("click", () => move(0));
  byId("previous").addEventListener("click", () => move(state.step - 1));
  byId("next").addEventListener("click", () => move(state.step + 1));
  byId("last").addEventListener("click", () => move(Infinity));
  byId("strip").addEventListener("click", (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    move(Math.floor(((event.clientX - left) / width) * current().trace.calls.length));
  });
  play.addEventListener("click", () => {
    if (timer) return stop();
    const { trace } = current();
    if (state.step === trace.calls.length - 1) show({ step: 0 });
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
    timer = setInterval(() => {
      show({ step: state.step + 1 });
      if (state.step === current().trace.calls.length - 1) stop();
    }, 900);
  });
  // Arrow keys step while the explorer is seen: wherever they have nothing else to do,
  // and in its lists of texts and of methods, which the other two arrows walk along.
  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const listed = event.target.closest("#text, #contenders");
    if (!listed && event.target.closest("input, select, textarea, .scroll, summary")) return;
    const { top, bottom } = byId("explorer").getBoundingClientRect();
    if (!listed && (bottom < 0 || top > innerHeight)) return;
    event.preventDefault();
    move(state.step + by);
  });
  addEventListener("hashchange", start);
  start();
})();
