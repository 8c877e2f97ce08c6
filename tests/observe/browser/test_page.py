"""The page in a real browser: figures are those of metrics.jsonl, filters filter, keys suffice, texts stay text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from hpcrl.observe.read.samples import read_step_samples
from hpcrl.observe.report.page import write_report
from tests.observe.stories import write_hostile_run, write_long_run, write_run_with_kills, write_seeds
from tests.observe.written_runs import write_metrics

pytestmark = pytest.mark.slow


def page_of(*runs: Path) -> Path:
    page = runs[0].parent / "report.html"
    write_report([str(run) for run in runs], page)
    return page


def metrics_of(run: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    run = write_long_run(tmp_path_factory.mktemp("runs") / "long", 200, archived=range(20, 201, 20))
    return run, page_of(run)


def test_figures_are_those_of_the_metrics(browser, long_run):
    run, page = long_run
    rows = metrics_of(run)
    browser.open(page)
    charts = {
        "Reward": "critic/score/mean",
        "Entropy": "actor/entropy",
        "Gradient norm": "actor/grad_norm",
        "MFU": "perf/mfu/actor",
        "Accuracy": "val-core/maths/acc/mean@1",
    }
    for title in charts:
        browser.type(f"figure[data-title='{title}'] summary", Keys.ENTER)
    shown = {title: browser.rows(f"figure[data-title='{title}'] table") for title in charts}
    for title, key in charts.items():
        expected = {step: row[key] for step, row in rows.items() if key in row}
        assert [int(step) for step, *_ in shown[title]] == list(expected)
        for step, value, *_ in shown[title]:
            assert float(value) == pytest.approx(expected[int(step)], rel=1e-4), (title, step)
    plot = "figure[data-title='Reward'] .plot"
    browser.type(plot, Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.text("figure[data-title='Reward'] .legend span") == "step 3"
    value = browser.text("figure[data-title='Reward'] .legend .value")
    assert float(value) == pytest.approx(rows[3]["critic/score/mean"], rel=1e-4)
    assert browser.text("figure[data-title='Entropy'] .legend span") == "step 3", "charts share the step"
    browser.check()


def test_filters_and_the_list_of_samples(browser, long_run):
    run, page = long_run
    browser.open(page)
    data = json.loads(browser.text("#data"))["runs"][0]["samples"]["samples"]

    def listed() -> list[str]:
        return browser.texts("#sample-list li")

    assert len(listed()) == len(data)
    for selector, keys, passes in (
        ("#filter-low", "0.4", lambda one: one["score"] >= 0.4),
        ("#filter-shortest", "30", lambda one: one["length"] >= 30),
        ("#filter-source", "words", lambda one: one["source"] == "words"),
        ("#filter-finish", "length", lambda one: one["finish"] == "length"),
        ("#filter-why", "best", lambda one: "best" in one["why"]),
        ("#filter-step", "200", lambda one: one["step"] == 200),
        ("#filter-text", " 7 7 7", lambda one: " 7 7 7" in one["text"]),
    ):
        browser.type(selector, keys)
        expected = [one for one in data if passes(one)]
        assert 0 < len(expected) < len(data)
        assert len(listed()) == len(expected), selector
        assert browser.text("#sample-count") == f"{len(expected)} of {len(data)} samples"
        browser.run("document.querySelector('#filter-reset').click()")
    browser.type("#sample-order", "lowest")
    scores = [float(text.split("score ")[1].split(",")[0]) for text in listed()]
    assert scores == sorted(scores)
    browser.check()


def test_a_sample_by_keys(browser, long_run):
    run, page = long_run
    browser.open(page)
    browser.type("#sample-list", Keys.END)
    samples = json.loads(browser.text("#data"))["runs"][0]["samples"]
    last = samples["samples"][-1]
    sample = read_step_samples(run, last["step"])[last["row"]]
    assert browser.text("#sample-response") == "".join(sample.token_texts)
    assert browser.text("#sample-prompt") == sample.prompt
    facts = dict(browser.rows("#sample-facts"))
    assert float(facts["score"]) == pytest.approx(sample.score, rel=1e-4)
    assert facts["judge"] == sample.parts["judge"] and facts["finish reason"] == sample.finish_reason
    browser.type("#sample-response", Keys.HOME, Keys.ARROW_RIGHT)
    read = browser.text("#token-readout")
    assert read.startswith("token 1 ")
    values = (part.rsplit(" ", 1) for part in read.split('": ', 1)[1].split(", "))
    found = {name: float(value) for name, value in values}
    assert found["advantage"] == pytest.approx(sample.advantages[1], abs=1e-4)
    assert found["entropy"] == pytest.approx(sample.entropies[1], abs=1e-3)
    browser.type("#token-colour", "entropy")
    opacity = "parseFloat(span.style.background.split(',')[3])"
    colours = browser.run(f"return [...document.querySelectorAll('#sample-response span')].map(span => {opacity})")
    order = sorted(range(len(colours)), key=lambda index: sample.entropies[index])
    assert colours[order[-1]] > colours[order[len(order) // 2]] > colours[order[0]]
    browser.type("#followed button", Keys.ENTER)
    same = [one for one in samples["samples"] if one["key"] == samples["followed"][0]["key"]]
    assert 1 < len(browser.texts("#sample-list li")) == len(same) < len(samples["samples"])
    assert browser.run("return document.activeElement.id") == "sample-list"
    browser.check()


def test_a_run_with_kills_and_requeues(browser, tmp_path):
    browser.open(page_of(write_run_with_kills(tmp_path / "killed")), scheme="dark")
    rows = browser.rows("#attempts")
    assert [row[9] for row in rows] == ["stopped, requeued", "killed, requeued", "hang, requeued", "running"]
    assert [row[11] for row in rows] == ["0", "3", "5", "-"]
    assert "NODE FAILURE" in rows[1][10] and rows[1][4] == "n[1-4]"
    assert browser.rows("#stragglers")[0][:4] == ["32", "5", "n3", "actor.update_actor"]
    plot = "figure[data-title='Busy time of the busiest rank by phase'] .plot"
    browser.type(plot, Keys.ARROW_DOWN, *[Keys.ARROW_RIGHT] * 31)
    read = browser.text("figure[data-title='Busy time of the busiest rank by phase'] output")
    assert "step 32, actor.update_actor" in read and "rank 5 on n3" in read
    browser.type("figure[data-title='Busy time by rank'] .plot", *[Keys.ARROW_DOWN] * 5, *[Keys.ARROW_RIGHT] * 31)
    read = browser.text("figure[data-title='Busy time by rank'] output")
    assert "step 32, rank 5 (n3): busy 14 s, median of the ranks 10 s" in read and "1.41 times as busy" in read
    assert "# Hang: rank 6 on n3" in browser.text("#hangs pre")
    dark = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(15, 18, 22)"
    browser.check()


def test_two_configurations_of_three_seeds(browser, tmp_path):
    runs = write_seeds(tmp_path)
    browser.open(page_of(*runs))
    figure = "figure[data-title='Reward']"
    assert "last values" in browser.texts(f"{figure} .legend > span")
    browser.type(f"{figure} .plot", Keys.END)
    values = [metrics_of(run)[100]["critic/score/mean"] for run in runs[:3]]
    mean = sum(values) / 3
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 3)
    text = browser.texts(f"{figure} .legend > span")[1]
    shown, band = text.removeprefix("grpo (3 seeds) ").split(" ±")
    assert float(shown) == pytest.approx(mean, rel=1e-4) and float(band) == pytest.approx(deviation, rel=1e-3)
    ratios = ["actor.clip_ratio", "0.2", "0.2", "0.2", "0.28", "0.28", "0.28"]
    assert browser.rows("#differences") == [ratios, ["run.seed", "0", "1", "2", "0", "1", "2"]]
    assert len(browser.rows("#runs")) == 6
    browser.check()


def test_texts_of_a_hostile_run_stay_text(browser, tmp_path):
    run = write_hostile_run(tmp_path / "hostile")
    browser.open(page_of(run))
    listed = len(browser.texts("#sample-list li"))
    assert listed > 20
    for _ in range(listed):
        browser.type("#sample-list", Keys.ARROW_DOWN)
    browser.run("document.querySelectorAll('summary').forEach(node => node.click())")
    browser.type("#filter-text", "attacked = 2")
    assert "</script><script>window.attacked = 2</script>" in browser.text("#sample-response")
    assert "window.attacked = 6" in browser.text("#configuration")
    assert browser.run("return document.body.scrollWidth <= innerWidth"), "long lines are broken"
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.check()
    added = "const node = document.createElement('script'); node.textContent = 'window.attacked = 8'"
    assert browser.run(f"{added}; document.body.append(node); return window.attacked") is None
    assert any("Content Security Policy" in message for message in browser.console()), "the policy is in force"


def test_it_prints(browser, long_run):
    _, page = long_run
    browser.open(page, scheme="dark")
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"]
    assert len(printed) > 100_000
    browser.check()


def test_the_verdict_comes_first_and_unfolds_its_chart(browser, tmp_path):
    run = write_long_run(tmp_path / "first", 60, archived=range(20, 61, 20))
    rows = [row | {"reward/errors": 5.0, "actor/entropy": 1.2} for row in metrics_of(run).values()]
    write_metrics(run, rows)
    logged = {"hpcrl": "the save failed", "hpcrl.run": "a rank is slow", "torch": "is deprecated"}
    lines = (f"2026-11-25 10:0{i}:00,123 WARNING {name}: {text}\n" for i, (name, text) in enumerate(logged.items()))
    (run / "logs" / "rank_00001.log").write_text("".join(lines))
    page = page_of(run)
    getter = "Object.defineProperty(Navigator.prototype, 'language', {get: () => 'C'})"
    script = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": getter})
    try:
        browser.open(page)
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    sections = browser.run("return [...document.querySelectorAll('main > section')].map(node => node.id)")
    assert sections[:2] == ["verdict", "first-last"]
    links = browser.texts("#verdict a.finding")
    assert links[0].startswith("Reward rose") and "scores fail: 5.0 errors" in links[1] and len(links) == 3
    headings = browser.texts("#first-last h3")
    assert headings[0].startswith("Step 20") and headings[1].startswith("Step 60")
    folded = "return document.querySelector('#chart-failed-scores-and-turns').open"
    assert not browser.run(folded)
    browser.run("document.querySelectorAll('#verdict a.finding')[1].click()")
    assert browser.run(folded)
    assert [row[3] for row in browser.rows("#warning-groups")] == ["hpcrl", "hpcrl.run"]
    assert browser.run("return document.querySelector('#library-warnings')") is None, "folded"
    browser.check()
