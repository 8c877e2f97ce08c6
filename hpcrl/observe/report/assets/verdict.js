/* The first lines of the page: the verdict of each run, and samples of its first and its last step. */

/** A sentence that leads to its chart or section. */
function sentence(finding) {
  return el("a", { href: `#${finding[2]}`, class: `finding ${finding[0]}` }, finding[1]);
}

function verdictSection(data) {
  return el("div", {}, ...data.runs.map((run) => el("div", { class: "verdict" },
    el("p", {}, data.runs.length > 1 ? el("strong", {}, `${run.name}: `) : null, ...run.verdict.sentences.flatMap((one) => [sentence(one), " "])),
    run.verdict.others.length ? el("ul", {}, ...run.verdict.others.map((one) => el("li", {}, sentence(one)))) : null)));
}

/** Pairs of samples of the first and the last step in the page: of one prompt, else random ones. */
function pairsOf(run) {
  const samples = run.samples.samples;
  const steps = samples.map((sample) => sample.step), of = (step) => samples.filter((sample) => sample.step === step);
  const first = of(Math.min(...steps)), last = of(Math.max(...steps));
  if (!first.length || first[0].step === last[0].step) return [];
  const shared = first.filter((one, index) => first.findIndex((other) => other.key === one.key) === index)
    .map((one) => [one, last.find((other) => other.key === one.key)]).filter(([, other]) => other);
  const drawn = (list) => list.find((sample) => sample.why.includes("random")) || list[0];
  return shared.length ? shared.slice(0, 2) : [[drawn(first), drawn(last)]];
}

function firstAndLast(data) {
  return perRun(data, "first-last", (run) => pairsOf(run).length, (run) => el("div", {}, ...pairsOf(run).map((pair) =>
    el("div", { class: "pair" }, ...pair.map((sample) => el("div", {},
      el("h3", {}, `Step ${sample.step}: score ${shown(sample.score)}, ${sample.length} tokens`),
      el("pre", { tabindex: "0" }, run.samples.prompts[sample.prompt]), el("pre", { tabindex: "0", class: "response" }, sample.text)))))));
}

/** Open what is folded around the target of a link of this page. */
function unfold(id) {
  for (let node = document.getElementById(id); node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
}
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  if (link) unfold(link.hash.slice(1));
});
addEventListener("hashchange", () => unfold(location.hash.slice(1)));
