from __future__ import annotations

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
        ("acount: abc", "acount: unknown key; expected one of account, partition"),
        ("container: {kind: docker}", "container.kind: "),
        ("account: a b", "account: "),
        ("environment: {'A B': x}", "environment"),
        ("venv: $HOME/venv", "venv: .*only scratch may contain variables"),
        ("container: {mounts: [/a:$HOME]}", "container.mounts.0: .*only scratch may contain variables"),
        ("container: {image: $HOME/x.sif}", "container.image: .*only scratch may contain variables"),
        ("scratch: $(touch x)", "scratch: .*expected an absolute path"),
        ("scratch: '/${x'", "scratch: .*expected an absolute path"),
        ("scratch: tmp", "scratch: .*expected an absolute path"),
        ("[", "not valid YAML"),
    ],
)
def test_a_wrong_site_file_gives_one_line(text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=line) as caught:
        load_site(path)
    assert "\n" not in str(caught.value) and "site.yaml" in str(caught.value)


def test_paths_are_those_of_whoever_submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.sif").touch()
    path = tmp_path / "site.yaml"
    path.write_text("{venv: ~/venv, container: {image: x.sif, mounts: [data, ~/a:/b:ro]}}")
    site = load_site(path)
    assert site.venv == "/home/me/venv"
    assert site.container.image == str(tmp_path / "x.sif")
    assert site.container.mounts == [str(tmp_path / "data"), "/home/me/a:/b:ro"]
    path.write_text("container: {image: docker://ubuntu}")
    assert load_site(path).container.image == "docker://ubuntu"
