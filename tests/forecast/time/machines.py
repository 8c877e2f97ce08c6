"""Machines with round figures."""

from __future__ import annotations

from typing import Any

from hpcrl.machine.machine_file import Machine

GPU: dict[str, Any] = {
    "name": "gpu",
    "sources": ["round figures"],
    "device": {
        "kind": "gpu",
        "memory_gib": 80.0,
        "matmul": {"bfloat16": {"flops": 8e14, "half_rows": 100.0}, "float32": {"flops": 5e13}},
        "attention": {"bfloat16": {"flops": 5e14, "half_rows": 500.0}},
        "memory_bandwidth": 3e12,
        "launch": 5e-6,
        "replay": 1e-6,
    },
    "node": {"ranks": 8, "host_copy": 5e10, "network": 4e11, "write": 5e9, "read": 5e9},
    "links": {
        "inside": {"latency": 3e-6, "bandwidth": 4e11},
        "between": {"latency": 1e-5, "bandwidth": 5e10},
    },
}
CPU: dict[str, Any] = {
    "name": "cpu",
    "sources": ["round figures"],
    "device": {
        "kind": "cpu",
        "matmul": {"float32": {"flops": 1e11, "half_rows": 16.0}},
        "attention": {"float32": {"flops": 3e10}},
        "memory_bandwidth": 1e10,
        "launch": 5e-6,
    },
    "node": {"ranks": 4, "cores": 2.0, "host_copy": 5e9, "write": 5e8, "read": 5e8},
    "links": {
        "inside": {"latency": 1e-5, "bandwidth": 4e9},
        "between": {"latency": 5e-5, "bandwidth": 1e9},
    },
}


def changed(tree: dict[str, Any], changes: dict[str, Any]) -> Machine:
    """The machine with other values of dotted keys."""
    return Machine.model_validate(_with(tree, changes))


def _with(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        tree = {**tree, name: _with(tree.get(name, {}), {rest: value}) if rest else value}
    return tree


def gpu(**changes: Any) -> Machine:
    return changed(GPU, {key.replace("__", "."): value for key, value in changes.items()})


def cpu(**changes: Any) -> Machine:
    return changed(CPU, {key.replace("__", "."): value for key, value in changes.items()})
