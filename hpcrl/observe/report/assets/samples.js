/* The browser of samples. */

const COLUMNS = { advantage: "advantage", gap: "log-prob gap: rollout - training", entropy: "entropy", log_prob: "log-prob of the rollout" };

function samplesOf(data) {
  return perRun(data, "samples", (run) => run.samples.samples.length, (run) => new SampleBrowser(run).node);
}

/** The values of a packed column; see `pack` in sample_choice.py. */
function unpacked(column, count) {
  if (!column || column.low === null) return new Array(count).fill(null);
  if (column.data === undefined) return new Array(count).fill(column.low);
  const bytes = atob(column.data), span = column.high - column.low;
  return Array.from({ length: count }, (_, i) => {
    const step = bytes.charCodeAt(2 * i) + 256 * bytes.charCodeAt(2 * i + 1);
    return step === 65535 ? null : column.low + (step / 65534) * span;
  });
}

class SampleBrowser {
  constructor(run) {
    this.run = run;
    this.samples = run.samples.samples;
    this.filters = { step: "", why: "", source: "", finish: "", key: "", text: "", low: "", high: "", shortest: "", longest: "" };
    this.order = "step";
    this.colour = Object.keys(COLUMNS).find((name) => this.samples.some((sample) => name in sample.columns)) || "";
    this.list = el("ul", { class: "list", id: "sample-list", role: "listbox", tabindex: "0", "aria-label": "Samples; up and down arrows choose one" });
    this.count = el("span", { class: "faint", id: "sample-count", "aria-live": "polite" });
    this.detail = el("div", { id: "sample-detail" });
    this.list.addEventListener("keydown", (event) => this.onListKey(event));
    this.node = el("div", {}, this.rule(), this.controls(), this.count, el("div", { class: "browser" }, this.list, this.detail), this.followed());
    this.update();
    drawn.push(() => { if (this.node.isConnected) this.show(); });
  }

  rule() {
    const { recorded, scanned, first, last, rule } = this.run.samples;
    const steps = new Set(this.samples.map((sample) => sample.step)).size;
    return el("p", { class: "note", id: "sample-rule" },
      `${this.samples.length} samples of ${steps} steps; the run has archived ${recorded} steps, ${first} to ${last}. The rule: the first and the last step, then the steps in the middle of the largest gaps while there is room; `,
      `of each the ${rule.best} best, the ${rule.worst} worst and ${rule.random} random samples; and the first sample of prompts that are followed over the steps. Scores of all samples were read in ${scanned} steps. `,
      "All samples in a terminal: ", el("code", {}, `hpcrl samples ${this.run.folder} --step ${last}`));
  }

  followed() {
    const followed = this.run.samples.followed;
    if (!followed.length) return null;
    const rows = followed.map((one) => {
      const sample = this.samples.find((found) => found.key === one.key);
      const [first, final] = [one.visits[0], one.visits[one.visits.length - 1]];
      const button = el("button", { type: "button", on: { click: () => this.follow(one.key) } }, "show");
      return [one.kind, sample ? this.run.samples.prompts[sample.prompt].slice(-160) : one.key, `${shown(first[1])} (step ${first[0]})`, `${shown(final[1])} (step ${final[0]})`, one.times, sample ? button : ""];
    });
    return el("div", {}, el("h3", {}, "Prompts over the steps: mean scores"),
      table([["", false], ["prompt", false], ["first", true], ["last", true], ["steps", true], ["samples", false]], rows, { id: "followed", "aria-label": "Prompts over the steps" }));
  }

  follow(key) {
    this.filters.key = key;
    this.keyInput.select.value = key;
    this.order = this.orderInput.select.value = "step";
    this.update();
    this.list.focus();
  }

  controls() {
    const distinct = (name) => [...new Set(this.samples.flatMap((sample) => sample[name]))].sort((a, b) => (typeof a === "number" ? a - b : a < b ? -1 : 1));
    const filter = (label, name, values) => choice(label, [["", "all"], ...values.map((value) => [value, value === "" ? "(none)" : value])],
      (value) => { this.filters[name] = value; this.update(); }, { id: `filter-${name}` });
    const field = (label, name, type) => el("label", {}, label, el("input", { type, id: `filter-${name}`, step: "any", on: { input: (event) => { this.filters[name] = event.target.value; this.update(); } } }));
    const keys = [...new Set(this.samples.map((sample) => sample.key))];
    this.keyInput = filter("Prompt", "key", keys);
    const columns = Object.keys(COLUMNS).filter((name) => this.samples.some((sample) => name in sample.columns));
    this.orderInput = choice("Order", [["step", "step"], ["low", "lowest score first"], ["high", "highest score first"], ["length", "longest first"]], (value) => { this.order = value; this.update(); }, { id: "sample-order" });
    const colour = choice("Colour of tokens", [...columns.map((name) => [name, COLUMNS[name]]), ["", "none"]], (value) => { this.colour = value; this.show(); }, { id: "token-colour" });
    return el("div", { class: "controls" },
      filter("Step", "step", distinct("step")).node, filter("Chosen as", "why", distinct("why")).node, filter("Data source", "source", distinct("source")).node,
      filter("Finish reason", "finish", distinct("finish")).node, field("Score from", "low", "number"), field("Score to", "high", "number"),
      field("Tokens from", "shortest", "number"), field("Tokens to", "longest", "number"), field("Text", "text", "search"), this.keyInput.node, this.orderInput.node, colour.node,
      el("button", { type: "button", id: "filter-reset", on: { click: () => this.reset() } }, "Show all"));
  }

  reset() {
    for (const name of Object.keys(this.filters)) {
      this.filters[name] = "";
      this.node.querySelector(`#filter-${name}`).value = "";
    }
    this.update();
  }

  matching() {
    const { step, why, source, finish, key, text, low, high, shortest, longest } = this.filters;
    const wanted = text.toLowerCase();
    const found = this.samples.filter((sample) =>
      (step === "" || sample.step === Number(step)) && (why === "" || sample.why.includes(why)) && (source === "" || sample.source === source) &&
      (finish === "" || sample.finish === finish) && (key === "" || sample.key === key) &&
      (low === "" || (sample.score !== null && sample.score >= Number(low))) && (high === "" || (sample.score !== null && sample.score <= Number(high))) &&
      (shortest === "" || sample.length >= Number(shortest)) && (longest === "" || sample.length <= Number(longest)) &&
      (wanted === "" || sample.text.toLowerCase().includes(wanted) || this.run.samples.prompts[sample.prompt].toLowerCase().includes(wanted)));
    const by = { low: (a, b) => a.score - b.score, high: (a, b) => b.score - a.score, length: (a, b) => b.length - a.length }[this.order];
    return by ? found.sort(by) : found;
  }

  update() {
    this.shown = this.matching();
    this.count.textContent = `${this.shown.length} of ${this.samples.length} samples`;
    this.list.replaceChildren(...this.shown.map((sample, index) => {
      const item = el("li", { role: "option", id: `sample-${index}`, on: { click: () => this.select(index) } },
        `step ${sample.step}, ${sample.why.join(", ")}: score ${shown(sample.score)}, ${sample.length} tokens`, el("span", { class: "snippet" }, sample.text.slice(0, 120)));
      return item;
    }));
    const again = this.shown.indexOf(this.current);
    this.select(again >= 0 ? again : 0);
  }

  onListKey(event) {
    const target = { ArrowDown: this.index + 1, ArrowUp: this.index - 1, PageDown: this.index + 10, PageUp: this.index - 10, Home: 0, End: this.shown.length - 1 }[event.key];
    if (target === undefined || !this.shown.length) return;
    event.preventDefault();
    this.select(Math.min(Math.max(target, 0), this.shown.length - 1));
  }

  select(index) {
    this.list.querySelectorAll('[aria-selected="true"]').forEach((item) => item.setAttribute("aria-selected", "false"));
    this.index = index;
    this.current = this.shown[index];
    const item = this.list.children[index];
    if (item) {
      item.setAttribute("aria-selected", "true");
      this.list.setAttribute("aria-activedescendant", item.id);
      const top = item.offsetTop - this.list.offsetTop; // scrollIntoView would move the page, too
      if (top < this.list.scrollTop) this.list.scrollTop = top;
      if (top + item.offsetHeight > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + item.offsetHeight - this.list.clientHeight;
    }
    this.show();
  }

  show() {
    const sample = this.current;
    if (!sample) {
      this.detail.replaceChildren(el("p", {}, "No sample passes the filters."));
      return;
    }
    const others = this.samples.filter((one) => one.key === sample.key && one !== sample);
    const facts = [["score", sample.score], ...sample.parts, ["tokens", sample.length], ["finish reason", sample.finish || "-"], ["data source", sample.source || "-"],
      ["step", sample.step], ["sample of its prompt", sample.index], ["prompt", sample.key]];
    this.detail.replaceChildren(
      table([["", false], ["", false]], facts.map(([name, value]) => [name, typeof value === "number" || value === null ? el("span", {}, shown(value)) : value]), { id: "sample-facts", "aria-label": "Score and its parts" }),
      el("h3", {}, "Prompt"), el("pre", { tabindex: "0", id: "sample-prompt" }, this.run.samples.prompts[sample.prompt]),
      el("h3", {}, "Response"), ...this.response(sample));
    if (others.length) {
      this.detail.append(el("h3", {}, "The same prompt"), el("div", { class: "same" }, ...others.map((one) =>
        el("button", { type: "button", on: { click: () => this.jump(one) } }, `step ${one.step}: ${shown(one.score)}`))));
    }
  }

  jump(sample) {
    if (!this.shown.includes(sample)) {
      this.reset();
    }
    this.select(this.shown.indexOf(sample));
    this.list.focus();
  }

  response(sample) {
    const count = sample.lengths.length;
    const values = Object.fromEntries(Object.keys(COLUMNS).filter((name) => name in sample.columns).map((name) => [name, unpacked(sample.columns[name], count)]));
    const column = values[this.colour] || [];
    const most = column.reduce((found, value) => Math.max(found, Math.abs(value || 0)), 0);
    const outside = new Set(sample.outside || []);
    const finite = column.filter((value) => value !== null);
    const range = finite.length ? `from ${shown(Math.min(...finite))} to ${shown(Math.max(...finite))}` : "not recorded";
    const output = el("output", { class: "readout", id: "token-readout" },
      this.colour ? `colour: ${COLUMNS[this.colour]}, ${range}; arrow keys in the text move over its tokens` : "");
    const text = el("div", { class: "prose tokens", tabindex: "0", id: "sample-response", role: "group", "aria-label": "Response; left and right arrows move over its tokens" });
    const spans = [];
    let at = 0;
    const [plus, minus] = [style("--plus"), style("--minus")];
    sample.lengths.forEach((length, i) => {
      if (sample.cut && i === sample.cut[0]) text.append(el("span", { class: "left-out" }, `\n[... ${sample.cut[1]} tokens left out ...]\n`));
      if (sample.labels && i in sample.labels) text.append(el("strong", {}, `${i ? "\n" : ""}${sample.labels[i]}\n`));
      const span = el("span", { class: outside.has(i) ? "outside" : null }, sample.text.slice(at, at + length));
      at += length;
      const value = column[i];
      if (value !== null && value !== undefined && most > 0 && value !== 0) {
        span.style.background = `rgba(${value > 0 ? plus : minus}, ${(0.08 + 0.62 * Math.abs(value) / most).toFixed(3)})`;
      }
      spans.push(span);
      text.append(span);
    });
    let active = -1;
    const activate = (index) => {
      if (spans[active]) spans[active].classList.remove("active");
      active = Math.min(Math.max(index, 0), spans.length - 1);
      if (!spans[active]) return;
      spans[active].classList.add("active");
      const place = sample.cut && active >= sample.cut[0] ? active + sample.cut[1] : active;
      const read = Object.entries(values).map(([name, found]) => `${COLUMNS[name]} ${shown(found[active])}`).join(", ");
      output.textContent = visible(`token ${place} ${JSON.stringify(spans[active].textContent.slice(0, 60))}: ${read || "no values"}${outside.has(active) ? " (not written by the model)" : ""}`);
    };
    text.addEventListener("keydown", (event) => {
      const target = { ArrowLeft: active - 1, ArrowRight: active + 1, Home: 0, End: spans.length - 1 }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      activate(target);
    });
    text.addEventListener("pointerover", (event) => { const index = spans.indexOf(event.target); if (index >= 0) activate(index); });
    return [output, text];
  }
}
