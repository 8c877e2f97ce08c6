"""Machine files: those of the package, those that are wrong, and those that are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import yaml_core
from hpcrl.config.yaml_core import ConfigError
from hpcrl.machine.machine_file import MACHINES, check_target, read_machine, save_machine

NAMES = sorted(path.stem for path in MACHINES.glob("*.yaml"))


def tree(name: str = "dgx_h100") -> dict[str, Any]:
    plain: dict[str, Any] = yaml_core.parse((MACHINES / f"{name}.yaml").read_text(), name).plain()
    return plain


def test_there_are_machines() -> None:
    assert len(NAMES) >= 7


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_is_valid_and_names_its_sources(name: str) -> None:
    machine = read_machine(name)
    assert machine.name == name and not machine.measured
    assert len(machine.sources) >= 3 and all(re.search(r"\S: https://\S+$", source) for source in machine.sources)
    device, links = machine.device, machine.links
    assert not machine.efficiency and not machine.spread, "they are fitted to runs"
    assert device.matmul["float32"].flops < device.matmul["bfloat16"].flops
    assert all(device.attention[dtype].flops < device.matmul[dtype].flops for dtype in device.attention)
    assert links.between.bandwidth < links.inside.bandwidth < device.memory_bandwidth
    assert links.inside.latency < links.between.latency and device.replay < device.launch
    assert all(0 < share < 1.1 for share in links.group.values()) and max(links.group) <= machine.node.ranks


def test_dense_rates() -> None:
    """Of a data sheet's rates, those without a star: with sparsity they would be twice as high."""
    dense = {"dgx_a100": 312, "dgx_h100": 989, "h200_ib": 989, "b200_ib": 2250, "gb200_nvl72": 2500, "mi300x": 1307}
    for name, rate in dense.items():
        assert read_machine(name).device.matmul["bfloat16"].flops / 1e12 == pytest.approx(rate, rel=0.01)


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    line = str(error.value)
    assert "\n" not in line
    return line


def test_a_wrong_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"

    def reading(changed: dict[str, Any]) -> str:
        path.write_text(yaml_core.dump(changed))
        with pytest.raises(ConfigError) as error:
            read_machine(str(path))
        return one_line(error)

    zero = tree()
    zero["device"]["matmul"]["bfloat16"]["flops"] = 0.0
    assert "device.matmul.bfloat16.flops" in reading(zero)
    unknown = tree()
    unknown["links"]["inside"]["bandwith"] = 1e9
    assert "bandwith" in reading(unknown)
    group = tree()
    group["links"]["group"] = {"many": 0.9}
    assert "links.group" in reading(group)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    for name, hint in ((str(tmp_path / "none.yaml"), "No such file"), ("dgx_h10", "did you mean dgx_h100?")):
        with pytest.raises(ConfigError) as error:
            read_machine(name)
        assert hint in one_line(error)


def test_a_device_is_no_machine_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError) as error:
        read_machine(str(tmp_path / "mine.yaml"))
    assert "a device; expected a regular file" in one_line(error)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.yaml")
    figures = {key: value for key, value in tree().items() if key != "name"}
    figures["links"]["group"] = {"2": 0.123456, "8": 0.5}
    assert save_machine(path, figures) == path
    machine = read_machine(path)
    assert machine.name == "mine" and machine.links.group == {2: 0.123, 8: 0.5}
    assert machine.device.matmul["bfloat16"].flops == pytest.approx(989.4e12, rel=1e-3)


def test_figures_that_cannot_be_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("before")
    figures = tree()
    figures["node"]["write"] = 0.0
    with pytest.raises(ConfigError) as error:
        save_machine(str(path), figures)
    assert "node.write" in one_line(error)
    assert path.read_text() == "before" and [entry.name for entry in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_target_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "file").touch()
    for name, wrong in (
        ("none/mine.yaml", "there is no folder"),
        ("file/mine.yaml", "there is no folder"),
        ("folder.yaml", "is a folder"),
        ("mine.json", "expected the name of a YAML file"),
    ):
        with pytest.raises(ConfigError) as error:
            check_target(str(tmp_path / name))
        assert wrong in one_line(error)
    check_target(str(tmp_path / "mine.yaml"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder.yaml"]
