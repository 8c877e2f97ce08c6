"""Names of a sweep's runs."""

from __future__ import annotations

from hpcrl.slurm.submit import array_elements


def test_each_element_is_a_run_that_a_container_can_mount() -> None:
    found = array_elements(["a.b=x/1,x:1,x_1", "c=1,2"], "runs", "sweep")
    names = [overrides[-1] for overrides in found]
    assert names[:2] == ["run.name='a.b=x_1+c=1'", "run.name='a.b=x_1+c=2'"]
    assert len(set(names)) == len(found) == 6
    assert not any(set(name) & set(",:/") for name in names)
    assert [overrides[:2] for overrides in found[2:4]] == [["a.b=x:1", "c=1"], ["a.b=x:1", "c=2"]]
