"""The templates of configs/one_gpu: their figures, and those of docs/one_gpu.md, are those of `hpcrl plan`."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from hpcrl.cli import load_job, main
from hpcrl.forecast.command import describe
from hpcrl.forecast.memory.fixes import tightest
from hpcrl.forecast.memory.memory import GIB, TrainingPlan
from hpcrl.forecast.memory.supervised import plan_of
from hpcrl.machine.check import ONE_GPU
from hpcrl.model.params import shards

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "one_gpu"
USABLE = {24: 22, 48: 44, 80: 76}  # GB of a GPU -> GiB that a job may take
JOBS = {"grpo": "train", "sft": "sft", "dpo": "preference"}
TEMPLATES = sorted(path for path in FOLDER.glob("*.yaml") if path.stem.partition("_")[0] in JOBS)
SAID = re.compile(
    r"^#   (?P<gb>[\d, ]+) GB: (?P<gib>[\d.]+) GiB(?:; with (?P<keys>.+): (?P<then>[\d.]+) GiB)?, fits$", re.M
)


def planned(path: Path, *overrides: str) -> TrainingPlan:
    job = load_job(JOBS[path.stem.partition("_")[0]])
    return plan_of(job, job.read_config(str(path), overrides))


def gib(job: TrainingPlan) -> float:
    return tightest(job.rows()).total / GIB


def said(path: Path) -> dict[int, re.Match[str]]:
    """GB of a GPU -> the line of a template's comment."""
    lines = SAID.finditer(path.read_text(encoding="utf-8"))
    return {int(gb): line for line in lines for gb in line["gb"].split(", ")}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_figures_of_a_template(path: Path) -> None:
    page = (ROOT / "docs" / "one_gpu.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{path.name}`")]
    cells = [cell.strip() for cell in row.split("|")[-4:-1]]
    assert list(said(path)) == list(USABLE)
    for (size, line), cell in zip(said(path).items(), cells, strict=True):
        overrides, keys = [f"job.gpu_memory_gib={USABLE[size]}"], line["keys"]
        job = planned(path, *overrides)
        assert gib(job) == pytest.approx(float(line["gib"]), rel=0.05)
        assert (gib(job) * GIB <= job.capacity) == (keys is None)
        if keys is not None:
            job = planned(path, *overrides, *keys.split())
            assert gib(job) * GIB <= job.capacity and gib(job) == pytest.approx(float(line["then"]), rel=0.05)
        assert cell == (f"{line['gib']}, fits" if keys is None else f"{line['gib']}; {line['then']} with overrides")


@pytest.mark.parametrize(
    ("template", "parameters"),
    [("grpo_0_5b", 494_032_768), ("grpo_1_5b", 1_543_714_304), ("grpo_3b_lora", 3_085_938_688)],
)
def test_a_model_has_as_many_parameters_as_published(template: str, parameters: int) -> None:
    shape = planned(FOLDER / f"{template}.yaml").models["actor"].shape
    assert sum(math.prod(shard.global_shape) for shard in shards(shape)) == parameters


@pytest.mark.parametrize(("least", "template"), ONE_GPU)
def test_what_check_recommends_fits(least: float, template: str) -> None:
    job = planned(FOLDER / f"{template}.yaml", f"job.gpu_memory_gib={0.92 * least}")
    assert gib(job) * GIB <= job.capacity


def test_supervised_jobs_hold_what_the_same_micro_batches_of_grpo_do() -> None:
    """SFT has no engine; DPO has a reference beside it, unless its log-probs are kept; both train the same policy."""
    own = ["data.max_response_length=512", "actor.ppo_max_token_len_per_gpu=4096"]
    budget = {"sft": ["sft.batch_size=512"], "preference": ["preference.batch_size=256"]}

    def update(job: TrainingPlan) -> tuple[int, ...]:
        return next(row for row in job.rows() if row.phase == "update_actor")[2:]

    grpo = update(planned(FOLDER / "grpo_0_5b.yaml", *own))
    assert update(planned(FOLDER / "sft_0_5b.yaml", *own, *budget["sft"])) == grpo
    pairs = ["preference.max_token_len_per_gpu=4096", *budget["preference"], *own]
    alone = planned(FOLDER / "dpo_0_5b.yaml", *pairs, "preference.precompute_ref_log_probs=true")
    assert update(alone) == grpo
    beside = update(planned(FOLDER / "dpo_0_5b.yaml", *pairs))
    assert beside[0] == 2 * grpo[0] and beside[1:] == grpo[1:]


def test_a_template_of_another_job_is_noted() -> None:
    path = str(FOLDER / "sft_0_5b.yaml")
    note = f"that of the section sft: hpcrl plan sft:{path}"
    assert any(note in line for line in describe(load_job("train"), path))
    assert not any("note:" in line for line in describe(load_job("sft"), path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rm:nowhere.yaml"], "found the job 'rm'; expected train, sft, preference, or a .py file"),
        (["sft:nowhere.yaml", "--machine", "dgx_h100"], "found --machine beside sft:, of which"),
        (["preference:nowhere.yaml", "--search"], "found --search beside preference:, of which"),
    ],
)
def test_what_has_no_figures_is_an_error(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(SystemExit) as caught:
        main(["plan", *arguments])
    assert caught.value.code == 2 and said in capfd.readouterr().err
