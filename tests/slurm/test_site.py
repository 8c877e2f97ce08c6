from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest

from hpcrl.cli import load_job
from hpcrl.config.yaml_core import ConfigError
from hpcrl.runtime.exits import InputError
from hpcrl.slurm import submit
from hpcrl.slurm.request import parse
from hpcrl.slurm.site import SITES, SiteConfig, find_site, load_site

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.stem for path in SITES.glob("*.yaml"))
NAMES = "alps frontier isambard_ai jupiter leonardo lumi_g marenostrum5 perlmutter"


def test_which_site_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_site(None, {}) is None and load_site(None) == SiteConfig()
    default = tmp_path / ".config" / "hpcrl" / "site.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("account: abc\n")
    assert find_site(None, {}) == default and load_site(default).account == "abc"
    assert find_site(None, {"HPCRL_SITE": "x.yaml"}) == Path("x.yaml")
    assert find_site("y.yaml", {"HPCRL_SITE": "x.yaml"}) == Path("y.yaml")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("acount: abc", "site.yaml:1: unknown key acount; did you mean account"),
        ("container: {kind: docker}", "site.yaml:1: container.kind is the text .docker.; expected none, apptainer"),
        ("account: a b", "account is the text .a b.; expected "),
        ("environment: {'A B': x}", "environment"),
        ("venv: $NO_SUCH/venv", "venv is the text .*expected NO_SUCH to be set in the environment"),
        ("container: {mounts: [/a:$NO_SUCH]}", r"container.mounts\[0\] is .*expected NO_SUCH to be set"),
        ("container: {image: $NO_SUCH/x.sif}", "container.image is .*expected NO_SUCH to be set"),
        ("environment: {HF_HOME: $NO_SUCH/hf}", "environment.HF_HOME is .*expected NO_SUCH to be set"),
        ("scratch: $(touch x)", "scratch is .*expected an absolute path"),
        ("scratch: $$HOME", "scratch is .*expected an absolute path"),
        ("scratch: '${oc.env:X,`id`}'", "scratch is .*expected an absolute path"),
        ("scratch: '/${x'", r"scratch is .*expected \$\{NAME\}, "),
        ("scratch: tmp", "scratch is .*expected an absolute path"),
        ("[", "not valid YAML"),
    ],
)
def test_a_wrong_site_file_gives_one_line(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=line) as caught:
        load_site(path)
    assert "\n" not in str(caught.value) and "site.yaml" in str(caught.value)


def test_a_pipe_is_no_site_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "site.yaml")
    with pytest.raises(ConfigError, match="site.yaml: a pipe; expected a regular file"):
        load_site(tmp_path / "site.yaml")


def test_paths_are_those_of_whoever_submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.sif").touch()
    path = tmp_path / "site.yaml"
    monkeypatch.setenv("DISK", "/disk/me")
    path.write_text(
        "{venv: ~/venv, container: {image: x.sif, mounts: [data, $DISK/a:/b:ro]}, environment: {H: $DISK/h}}"
    )
    site = load_site(path)
    assert site.venv == "/home/me/venv"
    assert site.container.image == str(tmp_path / "x.sif")
    assert site.container.mounts == [str(tmp_path / "data"), "/disk/me/a:/b:ro"]
    assert site.environment == {"H": "/disk/me/h"}
    path.write_text("container: {image: docker://ubuntu}")
    assert load_site(path).container.image == "docker://ubuntu"


def test_a_profile_is_found_by_its_name_and_extended_by_a_site_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert " ".join(PROFILES) == NAMES
    assert find_site("alps", {}) == SITES / "alps.yaml" == find_site(None, {"HPCRL_SITE": "alps"})
    with pytest.raises(ConfigError, match=f"^no site alp; expected a YAML file or one of {NAMES.replace(' ', ', ')}$"):
        find_site("alp", {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alps").write_text("account: of a file in this folder")
    assert find_site("alps", {}) == Path("alps")
    own = tmp_path / "own.yaml"
    own.write_text("extends: alps\naccount: g1\ncontainer: {image: hpcrl.toml}\nenvironment: {NCCL_PROTO: LL}")
    site, base = load_site(own), load_site(SITES / "alps.yaml")
    assert (site.account, site.container.kind, site.container.image) == ("g1", "edf", "hpcrl.toml")
    assert site.environment == base.environment | {"NCCL_PROTO": "LL"} and site.max_time == base.max_time
    for text, line in (("extends: alp", "no site alp; "), ("extends: [alps]", "own.yaml:1: extends is a list of 1")):
        own.write_text(text)
        with pytest.raises(ConfigError, match=line):
            load_site(own)


@pytest.mark.parametrize("name", PROFILES)
def test_each_value_of_a_profile_has_its_page_and_what_the_user_gives_is_open(name: str) -> None:
    site = load_site(SITES / f"{name}.yaml")
    assert (site.account, site.venv, site.container.image, site.container.mounts) == (None, None, None, [])
    assert site.gpus_per_node and site.fabric.net
    head, *blocks = (SITES / f"{name}.yaml").read_text(encoding="utf-8").split("\n\n")
    assert "NOT RUN" in head and "Left out" in head and not re.search(r"^[^#]", head, re.M)
    for block in blocks:
        source = " ".join(line.removeprefix("# ") for line in block.split("\n") if line.startswith("#"))
        assert re.match(r"https://\S+, read 2026-\d\d-\d\d\b", source), block
        assert block.startswith("#") and re.search(r"^\w+: ?", block, re.M)


@pytest.mark.parametrize("name", PROFILES)
def test_ppo_of_a_70b_model_can_be_submitted_on_each_profile(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    site = load_site(SITES / f"{name}.yaml")
    per_node = f"job.gpus_per_node={site.gpus_per_node}"
    asked = [str(ROOT / "configs" / "ppo_70b.yaml"), "--site", name, "--dry-run"]
    fits = [per_node, "--nodes", str(64 // (site.gpus_per_node or 8)), "--ntasks-per-node", str(site.gpus_per_node)]
    dry_run = partial(submit.run, load_job=load_job, check=lambda job, config, ranks: job.check(config, ranks))
    dry_run(parse([*asked, *fits], ["train"]))
    script, said = capsys.readouterr()
    gpus = (
        f"--gres=gpu:{site.gpus_per_node}" if site.gpu_directive == "gres" else f"--gpus-per-node={site.gpus_per_node}"
    )
    assert f"#SBATCH {gpus}\n" in script and "GPUs; set it" not in said
    for variable, value in site.environment.items():
        assert re.search(rf"^hpcrl_set {variable} '?{re.escape(value)}'?$", script, re.M)
    assert ("found no container.image" in said) == (site.container.kind != "none")
    dry_run(parse(asked, ["train"]))
    misfit = "job.gpus_per_node=8, but a node of this site has 4 GPUs; set it, job.ntasks_per_node and job.nodes"
    assert (misfit in capsys.readouterr().err) == (site.gpus_per_node == 4)
    if site.gpus_per_node == 4:
        with pytest.raises(InputError, match="job.gpus_per_node=8"):
            dry_run(parse(asked[:-1], ["train"]))
