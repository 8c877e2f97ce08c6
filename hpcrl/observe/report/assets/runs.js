/* Everything but the samples: overview, curves, times, ranks, slices, configuration, warnings. */

/** Sections in the order of the page: [id, title, the content or null]. */
function sectionsOf(data) {
  return [
    ["verdict", "Verdict", verdictSection(data)],
    ["first-last", "First and last step", firstAndLast(data)],
    ["overview", "Overview", overview(data)],
    ["learning", "Learning", chartsOf(data, "learning")],
    ["time", "Time and memory", timeOf(data)],
    ["ranks", "Ranks", perRun(data, "ranks", (run) => run.busy.steps.length || run.ranks.rows.length || run.stragglers.length, ranksOf)],
    ["slices", "Slices", slicesOf(data)],
    ["configuration", "Configuration", configurationOf(data)],
    ["warnings", "Warnings", perRun(data, "warnings", (run) => run.warnings.length, warningsOf)],
    ["hangs", "Hangs", perRun(data, "hangs", (run) => run.hangs.length, (run) => el("div", {}, ...run.hangs.map((text) => el("pre", { tabindex: "0" }, text))))],
    ["samples", "Samples", samplesOf(data)],
  ];
}

/** make(run) for one run at a time; with several runs, a choice above it. */
function perRun(data, name, has, make) {
  const runs = data.runs.filter(has);
  if (!runs.length) return null;
  const content = el("div", {});
  const show = (index) => content.replaceChildren(make(runs[index], data));
  show(0);
  if (runs.length === 1) return el("div", {}, data.runs.length > 1 ? el("p", { class: "faint" }, `of ${runs[0].name}`) : null, content);
  const { node } = choice("Run", runs.map((run, index) => [index, run.name]), (value) => show(Number(value)), { id: `${name}-run` });
  return el("div", {}, el("div", { class: "controls" }, node), content);
}

function stateOf(run) {
  return el("span", { class: `state-${run.state}` }, run.state || "-");
}

function overview(data) {
  const rows = data.runs.map((run) => {
    const found = run.summary;
    return [run.name, stateOf(run), `${shown(found.step)} / ${found.total ?? "?"}`, found.headline || "-", found.first, found.last, found.best,
      found.time || "-", found.seconds_per_step, found.throughput, found.ranks, found.attempts, found.lost, found.nodes || "-"];
  });
  const columns = [["run", false], ["state", false], ["step", true], ["metric", false], ["first", true], ["last", true], ["highest", true],
    ["in steps", true], ["s/step", true], ["tokens/s/rank", true], ["ranks", true], ["starts", true], ["steps lost", true], ["nodes", false]];
  const notes = data.runs.flatMap((run) => run.notes.map((note) => (data.runs.length > 1 ? `${run.name}: ${note}` : note)));
  return el("div", {}, table(columns, rows, { id: "runs", "aria-label": "Runs" }),
    ...data.runs.map((run) => el("p", { class: "faint" }, `${run.name}: ${run.folder}`)),
    notes.length ? el("div", { class: "note", id: "notes" }, el("h3", {}, "What is missing"), el("ul", {}, ...notes.map((note) => el("li", {}, note)))) : null,
    el("p", { class: "faint" }, "Charts: drag or use the arrow keys to move over the steps, Home and End for the ends; drag over a range to enlarge it, Escape or a double click to see all. ",
      "Bold lines of more than 30 points are means over a twentieth of the run, pale ones the values; numbers below the charts are the values. Dotted lines are steps from which the run was resumed."));
}

/** The lines of a panel: with one curve, colours are keys; with several, curves. Each line has its own dashes. */
function linesOf(data, panel) {
  const names = shortened(panel.keys), lines = [];
  panel.keys.forEach((key, k) => data.curves.forEach((curve, c) => {
    if (!curve.values[key]) return;
    const one = data.curves.length === 1;
    const label = one ? names[k] : panel.keys.length > 1 ? `${curve.name}: ${names[k]}` : curve.name;
    lines.push({ label, key, curve: curve.name, steps: curve.steps, values: curve.values[key], band: curve.band && curve.band[key], colour: one ? k : c, dash: lines.length });
  }));
  return lines;
}

/** Keys without the folders that all of them share. */
function shortened(keys) {
  const parts = keys.map((key) => key.split("/"));
  let shared = 0;
  while (parts.every((part) => part.length > shared + 1 && part[shared] === parts[0][shared])) shared++;
  return parts.map((part) => part.slice(shared).join("/"));
}

function chartsOf(data, section) {
  const panels = data.panels.filter((panel) => panel.section === section);
  if (!panels.length) return null;
  const marks = data.runs.length === 1 ? resumesOf(data.runs[0]) : [];
  const thinned = data.curves.filter((curve) => curve.steps.length < curve.num_steps);
  const drawnOnes = panels.map((panel) => [panel, linesOf(data, panel)]).filter(([, lines]) => lines.length);
  return el("div", {}, thinned.length ? el("p", { class: "note" }, `${thinned[0].steps.length} of ${thinned[0].num_steps} steps are drawn, evenly spaced; metrics.jsonl has all.`) : null,
    el("div", { class: "charts" }, ...drawnOnes.filter(([panel]) => !panel.is_flat).map(([panel, lines]) => chart({ ...panel, lines, marks }))),
    ...drawnOnes.filter(([panel]) => panel.is_flat).map(([panel, lines]) => flatChart(panel, lines, marks)));
}

/** A chart whose curves do not change, folded. */
function flatChart(panel, lines, marks) {
  const values = lines.map((line) => `${lines.length > 1 ? `${line.label} ` : ""}${shown(last(line.values))}`);
  const node = folded(`${panel.title}: ${values.join(", ")} in all steps`, () => chart({ ...panel, anchor: null, lines, marks }));
  node.id = panel.anchor;
  return node;
}

function resumesOf(run) {
  return run.attempts.map((attempt) => attempt.resumed_at).filter((step) => step !== null);
}

function timeOf(data) {
  const stacks = perRun(data, "phases", (run) => run.phases.steps.length, (run) => {
    const lines = Object.entries(run.phases.seconds).map(([label, values], index) => ({ label, steps: run.phases.steps, values, colour: index }));
    return el("div", { class: "charts" }, chart({ title: "Seconds per phase", unit: "s, as rank 0 waited for them", lines, stacked: true, wide: true, height: 280, marks: resumesOf(run) }));
  });
  const charts = chartsOf(data, "time");
  return stacks || charts ? el("div", {}, stacks, charts) : null;
}

/** A heat map of rows {label, seconds, median}, coloured by imbalance or by seconds. */
function busyMap({ name, title, steps, rows, describe }) {
  const most = Math.max(...rows.flatMap((row) => row.seconds.map((value) => value || 0)), 1e-9);
  const over = (row) => row.seconds.map((value, i) => (value === null || !row.median[i] ? null : value / Math.max(row.median[i], 1e-3)));
  const kinds = { excess: ["times the median, 1 to 2", over, 1, 2], seconds: ["seconds", (row) => row.seconds, 0, most] };
  const map = el("div", {});
  const show = (kind) => {
    const [unit, values, low, high] = kinds[kind];
    map.replaceChildren(heatMap({ title, unit, steps, rows: rows.map((row) => ({ ...row, values: values(row) })), describe, low, high }));
  };
  show("excess");
  return el("div", {}, el("div", { class: "controls" }, choice("Colour", [["excess", "imbalance"], ["seconds", "seconds"]], show, { id: `${name}-colour` }).node), map);
}

function median(values) {
  const ordered = values.filter((value) => value !== null).sort((a, b) => a - b);
  return ordered.length ? (ordered[(ordered.length - 1) >> 1] + ordered[ordered.length >> 1]) / 2 : null;
}

/** What was reported about a rank at a step, as text. */
function slowAt(run, step, test) {
  return run.stragglers.filter((one) => one.step === step && test(one))
    .map((one) => `; rank ${one.rank} on ${one.node} is ${shown(one.ratio)} times as busy as its peers in ${one.phase}`).join("");
}

function ranksOf(run) {
  const { busy, ranks } = run, names = Object.keys(busy.phases);
  const marksOf = (steps, test) => run.stragglers.filter(test).map((one) => nearest(steps, one.step)).filter((index) => index !== null);
  const medians = ranks.steps.map((_, column) => median(ranks.rows.map((row) => row.seconds[column])));
  const byRank = ranks.rows.map((row) => ({
    label: `rank ${row.rank} (${row.node})`, seconds: row.seconds, median: medians, marks: marksOf(ranks.steps, (one) => one.rank === row.rank),
  }));
  const byPhase = names.map((label) => ({
    label, seconds: busy.phases[label].max, median: busy.phases[label].median, marks: marksOf(busy.steps, (one) => one.phase === label),
  }));
  const describeRank = (row, column) =>
    `step ${ranks.steps[column]}, ${byRank[row].label}: busy ${shown(byRank[row].seconds[column])} s, median of the ranks ${shown(medians[column])} s` +
    slowAt(run, ranks.steps[column], (one) => one.rank === ranks.rows[row].rank);
  const describePhase = (row, column) => {
    const found = busy.phases[names[row]];
    return `step ${busy.steps[column]}, ${names[row]}: busiest rank ${shown(found.max[column])} s, median ${shown(found.median[column])} s, least ${shown(found.min[column])} s` +
      slowAt(run, busy.steps[column], (one) => one.phase === names[row]);
  };
  const slow = run.stragglers.map((one) => [one.step, one.rank, one.node, one.phase, one.ratio]);
  return el("div", {},
    el("p", { class: "faint" }, "Busy: at work, without waiting for other ranks inside MPI. Triangles: steps in which a rank was reported as slower than its peers. ",
      byRank.length ? "" : "This run has no traces of its ranks, so only the busiest rank of each phase is known."),
    byRank.length ? busyMap({ name: "busy-ranks", title: "Busy time by rank", steps: ranks.steps, rows: byRank, describe: describeRank }) : null,
    byPhase.length ? busyMap({ name: "busy-phases", title: "Busy time of the busiest rank by phase", steps: busy.steps, rows: byPhase, describe: describePhase }) : null,
    el("h3", {}, "Stragglers"),
    slow.length ? table([["step", true], ["rank", true], ["node", false], ["phase", false], ["times its peers", true]], slow, { id: "stragglers", "aria-label": "Stragglers" }) : el("p", { class: "faint" }, "No rank was reported as slow."));
}

function nearest(steps, step) {
  if (!steps.length || step < steps[0] || step > steps[steps.length - 1]) return null;
  let best = 0;
  steps.forEach((one, index) => { if (Math.abs(one - step) < Math.abs(steps[best] - step)) best = index; });
  return best;
}

function slicesOf(data) {
  return perRun(data, "slices", (run) => run.attempts.length || run.checkpoints.length, (run) => {
    const rows = run.attempts.map((one, index) => {
      const steps = one.last_step === null ? "-" : `${one.first_step ?? "?"} to ${one.last_step}`;
      const job = one.job ? `${one.job}${one.restart === null ? "" : `, restart ${one.restart}`}${one.relaunch ? `, relaunch ${one.relaunch}` : ""}` : "-";
      return [index + 1, one.started || "-", one.ended || "-", job, one.nodes || "-", one.ranks, one.resumed_at === null ? "new" : `step ${one.resumed_at}`, steps,
        one.saved.length ? one.saved.slice(-6).join(", ") : "-", el("span", { class: `state-${one.outcome}` }, one.outcome + (one.requeued ? ", requeued" : "")), one.reason, one.lost_steps];
    });
    const columns = [["", true], ["first log line", false], ["last log line", false], ["Slurm job", false], ["nodes", false], ["ranks", true], ["from", false], ["steps", false],
      ["saved", false], ["ended", false], ["why", false], ["steps lost", true]];
    const saved = run.checkpoints.map((one) => [one.step, one.gib, one.is_exported ? "yes" : ""]);
    return el("div", {}, rows.length ? table(columns, rows, { id: "attempts", "aria-label": "Starts of the run" }) : null,
      saved.length ? el("div", {}, el("h3", {}, "Checkpoints that are there"),
        table([["step", true], ["GiB", true], ["Hugging Face directory", false]], saved, { id: "checkpoints", "aria-label": "Checkpoints" })) : null);
  });
}

function configurationOf(data) {
  if (!data.config.length) return null;
  const of = (rows) => rows.map((row) => [row.key, ...data.runs.map((_, index) => row.values[row.differs ? index : 0] ?? "(not set)")]);
  const columns = [["key", false], ...data.runs.map((run) => [run.name, false])];
  const differing = data.config.filter((row) => row.differs);
  const all = (rows, name) => table(rows.length && rows[0].differs ? columns : [["key", false], ["value", false]],
    rows.length && rows[0].differs ? of(rows) : rows.map((row) => [row.key, row.values[0]]), { id: name, "aria-label": name });
  const equal = data.config.filter((row) => !row.differs);
  return el("div", {},
    data.runs.length > 1 ? (differing.length ? all(differing, "differences") : el("p", {}, "The runs have the same configuration.")) : null,
    folded(`${equal.length} keys${data.runs.length > 1 ? " that are equal" : ""}`, () => all(equal, "keys")));
}

function warningsOf(run) {
  const isOwn = (one) => one.logger.split(".")[0] === "hpcrl";
  const groups = (found, id) => table([["times", true], ["level", false], ["first line of the group", false], ["logger", false], ["ranks", false], ["first", false], ["last", false]],
    found.map((one) => [one.count, one.level.toLowerCase(), one.text, one.logger, one.ranks, one.first, one.last]), { id, "aria-label": "Warnings" });
  const own = run.warnings.filter(isOwn), others = run.warnings.filter((one) => !isOwn(one));
  const counted = (count, found) => `${count} groups${count > found.length ? `, the first ${found.length} are shown` : ""}`;
  return el("div", {}, el("p", { class: "faint" }, `Lines that differ in numbers only are one group. Of hpcrl: ${counted(run.num_warnings.own, own)}.`),
    own.length ? groups(own, "warning-groups") : null,
    others.length ? folded(`Of libraries: ${counted(run.num_warnings.libraries, others)}`, () => groups(others, "library-warnings")) : null);
}
