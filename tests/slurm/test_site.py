from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcrl.config.yaml_core import ConfigError
from hpcrl.slurm.site import SiteConfig, find_site, load_site


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
