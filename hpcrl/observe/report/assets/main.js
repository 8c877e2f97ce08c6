/* Build the page. */

function build() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page"), nav = document.getElementById("sections");
  page.append(el("h1", {}, data.runs.map((run) => run.name).slice(0, 6).join(", ") + (data.runs.length > 6 ? ", ..." : "")),
    el("p", { class: "faint" }, `hpcrl report, made ${data.made}`));
  for (const [id, title, content] of sectionsOf(data)) {
    if (!content) continue;
    nav.append(el("a", { href: `#${id}` }, title));
    page.append(el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), content));
  }
  for (const link of page.querySelectorAll("a.finding")) if (!document.getElementById(link.hash.slice(1))) link.removeAttribute("href");
  document.documentElement.dataset.ready = "yes";
}

build();
