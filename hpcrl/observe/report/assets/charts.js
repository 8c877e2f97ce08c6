/* Curves and stacked areas by uPlot, and the heat map. All are redrawn when colours change. */

const LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#2F9BD6", "#8C564B", "#5F5F5F", "#7A4FBF", "#3D7A1F", "#A01C4B", "#BBBBBB"];
const DARK = ["#4DA3E0", "#FF8A3D", "#2CC79A", "#E39AC7", "#E6B93C", "#7CC8F5", "#C48A7D", "#A9A9A9", "#B395F0", "#86C66A", "#E8709A", "#666666"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [16, 4], [4, 8]];
const MOST_BARS = 300; // steps of a stacked chart that are bars; of more, areas
const STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]); // between two ticks
const drawn = []; // functions that redraw a chart
let isPrinting = false;

function palette(index) {
  const dark = !isPrinting && matchMedia("(prefers-color-scheme: dark)").matches;
  return (dark ? DARK : LIGHT)[index % LIGHT.length];
}

function redrawAll() {
  for (const redraw of drawn) redraw();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
function setPrinting(is) {
  isPrinting = is;
  document.documentElement.classList.toggle("printing", is);
  redrawAll();
}
addEventListener("beforeprint", () => setPrinting(true));
addEventListener("afterprint", () => setPrinting(false));

/** Centred mean over a window of values; gaps stay gaps. */
function smoothed(values) {
  const present = values.reduce((count, value) => count + (value !== null && value !== undefined), 0);
  const half = Math.floor(Math.max(5, present / 20) / 2);
  const places = [], numbers = [];
  values.forEach((value, index) => { if (value !== null && value !== undefined) { places.push(index); numbers.push(value); } });
  const found = new Array(values.length).fill(null);
  places.forEach((place, index) => {
    let sum = 0, count = 0;
    for (let i = Math.max(0, index - half); i <= Math.min(numbers.length - 1, index + half); i++) { sum += numbers[i]; count++; }
    found[place] = sum / count;
  });
  return found;
}

/**
 * A chart of lines or, with `stacked`, of areas one upon the other.
 * lines: {label, steps, values, band, colour, dash}. marks: steps with a vertical line, such as those of a resume.
 */
function chart({ title, unit, anchor = null, lines, marks = [], stacked = false, wide = false, height = 210 }) {
  const plot = el("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title}: arrow keys move over the steps` });
  const legend = el("div", { class: "legend", "aria-live": "polite" });
  const figure = el("figure", { class: wide ? "full" : null, id: anchor, "data-title": title },
    el("figcaption", {}, title, unit ? el("span", { class: "faint" }, ` (${unit})`) : null), plot, legend,
    folded("Table", () => valuesTable(title, lines)));
  const joined = uPlot.join(lines.map((line) => [line.steps, line.values]));
  const steps = joined[0];
  const raw = joined.slice(1).map((values) => values.map((value) => (value === undefined ? null : value)));
  const data = [steps], series = [{}], bands = [];
  const add = (values, options) => { data.push(values); series.push({ spanGaps: true, points: { show: false }, ...options }); return data.length - 1; };
  const asBars = stacked && steps.length <= MOST_BARS;
  if (stacked) {
    const sums = new Array(steps.length).fill(0);
    const layers = raw.map((values) => values.map((value, index) => (sums[index] += value || 0)));
    for (let i = layers.length - 1; i >= 0; i--) {
      const colour = () => palette(lines[i].colour);
      add(layers[i], { stroke: colour, fill: colour, width: 0.5, paths: asBars ? uPlot.paths.bars({ size: [1, Infinity] }) : undefined });
    }
  } else {
    raw.forEach((values, i) => {
      const line = lines[i], colour = () => palette(line.colour);
      const count = values.reduce((sum, value) => sum + (value !== null), 0);
      const smooth = count > 30;
      const dash = DASHES[(line.dash || 0) % DASHES.length];
      if (line.band) {
        const [, widths] = uPlot.join([[steps, raw[i]], [line.steps, line.band]]).slice(1);
        const edges = [1, -1].map((sign) => values.map((value, j) => (value === null || widths[j] == null ? null : value + sign * widths[j])));
        const [high, low] = edges.map((edge) => add(smooth ? smoothed(edge) : edge, { stroke: null, width: 0 }));
        bands.push({ series: [high, low], fill: () => palette(line.colour) + "33" });
      } else if (smooth) {
        add(values, { stroke: () => palette(line.colour) + "55", width: 1 });
      }
      add(smooth ? smoothed(values) : values, { stroke: colour, width: 2, dash, points: { show: count < 30, size: 5, fill: colour } });
    });
  }
  const show = (index) => {
    const texts = lines.map((line, i) => {
      const value = index === null ? last(raw[i]) : raw[i][index];
      const sum = line.band && index !== null ? line.band[line.steps.indexOf(steps[index])] : null;
      return el("span", {}, swatch(line), `${stacked ? `${i + 1} ` : ""}${line.label} `, el("span", { class: "value" }, shown(value)), sum == null ? null : ` ±${shown(sum)}`);
    });
    legend.replaceChildren(el("span", { class: "faint" }, index === null ? "last values" : `step ${steps[index]}`),
      ...(stacked ? [el("span", { class: "faint" }, "from the bottom up")] : []), ...texts);
  };
  const axis = { stroke: () => style("--faint"), grid: { stroke: () => style("--grid"), width: 1 }, ticks: { stroke: () => style("--grid"), width: 1 }, font: "11px system-ui, sans-serif" };
  const options = {
    width: 400, height, series, bands, legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false }, sync: { key: "steps", scales: ["x", null] }, points: { show: !stacked } },
    scales: { x: { time: false, range: (u, low, high) => (asBars || low === high ? [low - 0.5, high + 0.5] : [low, high]) }, y: { range: (u, low, high) => rangeOf(low, high, stacked) } },
    axes: [{ ...axis, size: 28, incrs: STEPS }, { ...axis, size: 58, values: (u, ticks) => ticks.map(tick) }],
    hooks: { setCursor: [(u) => show(u.cursor.idx === undefined ? null : u.cursor.idx)], draw: [(u) => drawMarks(u, marks)] },
  };
  const u = new uPlot(options, data, plot);
  show(null);
  plot.addEventListener("keydown", (event) => {
    const at = u.cursor.idx ?? -1, page = Math.max(1, Math.floor(steps.length / 10));
    const target = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - page, PageDown: at + page, Home: 0, End: steps.length - 1 }[event.key];
    if (event.key === "Escape") u.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
    if (target === undefined) return;
    event.preventDefault();
    const index = Math.min(Math.max(target, 0), steps.length - 1);
    u.setCursor({ left: u.valToPos(steps[index], "x"), top: 10 }, true, true);
  });
  new ResizeObserver(() => u.setSize({ width: Math.max(plot.clientWidth, 200), height })).observe(plot);
  drawn.push(() => { u.redraw(false); show(u.cursor.idx ?? null); });
  return figure;
}

function rangeOf(low, high, fromZero) {
  if (low === null) return [0, 1];
  if (fromZero) return [0, high * 1.05 || 1];
  const around = Math.abs(low) * 0.1 || 1;
  return low === high ? [low - around, high + around] : uPlot.rangeNum(low, high, 0.1, true);
}

function last(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
  return null;
}

/** A piece of the line with its dashes; of an area, a square. */
function swatch(line) {
  const node = el("span", { class: line.dash === undefined ? "swatch" : "swatch line", "aria-hidden": "true" });
  const colour = palette(line.colour), dash = DASHES[(line.dash || 0) % DASHES.length];
  let at = 0;
  const stops = dash.map((length, i) => `${i % 2 ? "transparent" : colour} ${at}px ${(at += length)}px`);
  node.style.background = stops.length ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : colour;
  return node;
}

function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = style("--faint");
  ctx.lineWidth = 1;
  ctx.setLineDash([2, 4]);
  for (const step of marks) {
    const x = Math.round(u.valToPos(step, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function valuesTable(title, lines) {
  const joined = uPlot.join(lines.map((line) => [line.steps, line.values]));
  const rows = joined[0].map((step, index) => [step, ...joined.slice(1).map((values) => values[index] ?? null)]);
  const kept = rows.filter((row) => row.slice(1).some((value) => value !== null));
  return table([["step", true], ...lines.map((line) => [line.label, true])], kept, { "aria-label": `${title}, values` });
}

/**
 * A heat map: rows of values over steps. rows: {label, values, marks}; marks: indices of columns with a triangle.
 * describe(row, column) is the text of a cell.
 */
function heatMap({ title, unit, steps, rows, describe, low, high }) {
  const ROW = 20, LEFT = 210, BOTTOM = 22, most = 240;
  const canvas = el("canvas", {});
  const plot = el("div", { class: "plot heat", tabindex: "0", role: "group", "aria-label": `${title}: arrow keys move over the cells` }, canvas);
  const output = el("output", { class: "readout" });
  const bins = Math.min(steps.length, most);
  const columnOf = (bin) => [Math.floor((bin * steps.length) / bins), Math.floor(((bin + 1) * steps.length) / bins)];
  const cells = rows.map((row) => Array.from({ length: bins }, (_, bin) => {
    const [from, to] = columnOf(bin);
    return row.values.slice(from, to).reduce((most, value) => (value === null ? most : Math.max(most ?? value, value)), null);
  }));
  let at = null;
  const geometry = () => {
    const width = Math.max(plot.clientWidth, 320), left = Math.min(LEFT, width * 0.4);
    return { width, left, cell: (width - left - 4) / bins };
  };
  const draw = () => {
    const { width, left, cell } = geometry(), ratio = window.devicePixelRatio || 1;
    const height = rows.length * ROW + BOTTOM;
    canvas.width = width * ratio; canvas.height = height * ratio;
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    rows.forEach((row, r) => {
      ctx.fillStyle = style("--ink");
      ctx.textAlign = "right";
      ctx.fillText(visible(row.label).slice(0, 36), left - 6, r * ROW + ROW / 2, left - 8);
      cells[r].forEach((value, bin) => {
        if (value === null) return;
        const share = Math.min(Math.max((value - low) / (high - low || 1), 0), 1);
        ctx.fillStyle = `rgba(${style("--minus")}, ${0.08 + 0.92 * share})`;
        ctx.fillRect(left + bin * cell, r * ROW + 1, Math.max(cell, 0.6), ROW - 2);
      });
      for (const mark of row.marks) {
        const x = left + (mark + 0.5) * ((width - left - 4) / steps.length), y = r * ROW;
        ctx.fillStyle = style("--bad");
        ctx.beginPath(); ctx.moveTo(x - 5, y + 1); ctx.lineTo(x + 5, y + 1); ctx.lineTo(x, y + 10); ctx.fill();
        ctx.strokeStyle = style("--ground"); ctx.stroke();
      }
    });
    ctx.fillStyle = style("--faint");
    ctx.textAlign = "left"; ctx.fillText(`step ${steps[0]}`, left, rows.length * ROW + 12);
    ctx.textAlign = "right"; ctx.fillText(`step ${steps[steps.length - 1]}`, width - 4, rows.length * ROW + 12);
    if (at) {
      ctx.strokeStyle = style("--focus"); ctx.lineWidth = 2;
      ctx.strokeRect(left + at.bin * cell - 1, at.row * ROW, Math.max(cell, 2) + 2, ROW);
    }
  };
  const select = (row, bin) => {
    at = { row: Math.min(Math.max(row, 0), rows.length - 1), bin: Math.min(Math.max(bin, 0), bins - 1) };
    const [from, to] = columnOf(at.bin);
    let column = from;
    for (let i = from; i < to; i++) if (rows[at.row].values[i] === cells[at.row][at.bin]) { column = i; break; }
    output.textContent = visible(describe(at.row, column));
    draw();
  };
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -bins], End: [0, bins] }[event.key];
    if (!move) return;
    event.preventDefault();
    select((at ? at.row : 0) + move[0], (at ? at.bin : 0) + move[1]);
  });
  plot.addEventListener("pointermove", (event) => {
    const { left, cell } = geometry(), box = canvas.getBoundingClientRect();
    const bin = Math.floor((event.clientX - box.left - left) / cell), row = Math.floor((event.clientY - box.top) / ROW);
    if (bin >= 0 && bin < bins && row >= 0 && row < rows.length) select(row, bin);
  });
  new ResizeObserver(draw).observe(plot);
  drawn.push(draw);
  return el("figure", { class: "full", "data-title": title }, el("figcaption", {}, title, el("span", { class: "faint" }, ` (${unit})`)), plot, output);
}
