/* Elements, text and numbers. Text becomes text nodes only. */

/** An element. attributes: of our own names; children: elements, or values that become text. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    } else {
      node.setAttribute(name, value === true ? "" : value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map((child) =>
    child instanceof Node ? child : visible(String(child))));
  return node;
}

/** Text in which characters that cannot be seen, or that reorder others, have a visible form. */
function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu, (found) => {
    if ("\n\t\u200c\u200d".includes(found)) return found; // joiners are parts of emoji and of words
    const code = found.codePointAt(0);
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : "\\u" + code.toString(16).padStart(4, "0");
  });
}

/** Five significant digits; whole numbers in full. */
function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

/** A value at an axis: three significant digits. */
function tick(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value), short = Number(value.toPrecision(6));
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? Number(value.toPrecision(3)).toExponential() : String(short);
}

/** A table. columns: [title, is it a number]; rows: lists of values or elements. */
function table(columns, rows, attributes) {
  const cell = (value, index) => {
    const isNumber = columns[index][1];
    const text = typeof value === "number" || value === null || value === undefined ? shown(value) : value;
    const isLong = typeof text === "string" && text.length > 30;
    return el("td", { class: isNumber ? "number" : isLong ? "text long" : "text" }, text);
  };
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": (attributes || {})["aria-label"] || "Table" },
    el("table", attributes || {},
      el("thead", {}, el("tr", {}, ...columns.map(([title, isNumber]) =>
        el("th", { scope: "col", class: isNumber ? "number" : null }, title)))),
      el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map(cell))))));
}

/** A <details> whose content is made when it is first opened. */
function folded(title, make) {
  const summary = el("summary", {}, title), node = el("details", {}, summary);
  const fill = () => { if (node.childElementCount === 1) node.append(make()); };
  summary.addEventListener("click", fill);
  node.addEventListener("toggle", fill); // opened by a search in the page
  return node;
}

/** A labelled <select>. options: [value, text]. */
function choice(label, options, onChange, attributes) {
  const select = el("select", { ...(attributes || {}), on: { change: () => onChange(select.value) } },
    ...options.map(([value, text]) => el("option", { value }, text)));
  return { node: el("label", {}, label, select), select };
}

/** The value of one of the page's custom properties. */
function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
