"""NCCL's logs of five fabrics, written after the formats of its source, and what is found wrong, with the line to add.

No log of several GPUs has been seen here.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hpcrl.machine.check import GIB, Finding
from hpcrl.machine.check_job import gpu_support_findings
from hpcrl.machine.fabric import (
    Expected,
    NcclLog,
    Rates,
    clock_findings,
    error_advice,
    joined,
    nccl_versions,
    network_findings,
    parse_log,
    rate_findings,
    read_expected,
    state_findings,
)
from hpcrl.machine.facts import GpuClock, NodeState, find_adapters, gpu_clock
from hpcrl.runtime.exits import InputError

# rank 1 of 4 ranks on two nodes; channels are completed by `log`
SLINGSHOT = """
NCCL version 2.27.7+cuda12.9
NET/Plugin: Loaded net plugin AWS Libfabric (v10)
NET/OFI Initializing aws-ofi-nccl 1.14.2
NET/OFI Using Libfabric version 1.22
NET/OFI Selected provider is cxi, fabric is cxi (found 4 nics)
Using network AWS Libfabric
Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
Channel 00/0 : 1[1] -> 2[0] [send] via NET/AWS Libfabric/1(0)/GDRDMA/Shared
Channel 01/0 : 2[0] -> 1[1] [receive] via NET/AWS Libfabric/1/GDRDMA
"""
SLINGSHOT_ON_TCP = """
NCCL version 2.30.7+cuda13.0
NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
NET/IB : No device found.
NET/Socket : Using [0]hsn0:10.0.0.1<0> [1]hsn1:10.0.0.2<0>
Using network Socket
Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
"""
INFINIBAND = """
NCCL version 2.28.9+cuda13.0
NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.0.1<0>
Using network IB
NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
GPU Direct RDMA Enabled for GPU 1 / HCA 1 (distance 4 <= 5), read 1 mode Default
Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/1/GDRDMA(PCI)
Channel 00/0 : 2[0] -> 1[1] [receive] via NET/IB/1
"""
INFINIBAND_THROUGH_HOST = """
NCCL version 2.21.5+cuda12.4
Using network IB
GPU Direct RDMA Disabled for GPU 1b000 / HCA 10 (distance 8 > 5)
Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0
Channel 00/0 : 2[0] -> 1[1] [receive] via NET/IB/0
"""
ONE_NODE = """
NCCL version 2.28.9+cuda13.0
NET/Socket : Using [0]lo:127.0.0.1<0>
Using network Socket
Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
Channel 01/0 : 1[1] -> 2[2] via P2P/IPC
"""
RCCL = """
RCCL version : 2.21.5-HEAD:a1b2c3d
NET/OFI Selected Provider is cxi (found 4 nics)
Using network AWS Libfabric
Channel 02/0 : 0[c1000] -> 1[c6000] via P2P/IPC comm 0x95cdeb0 nRanks 04
Channel 02/0 : 1[c6000] -> 2[c1000] [send] via NET/AWS Libfabric/1/GDRDMA comm 0x95cdeb0 nRanks 04
"""
CSCS = {
    "FI_CXI_RDZV_GET_MIN": "0",
    "FI_CXI_RDZV_THRESHOLD": "0",
    "FI_CXI_RDZV_EAGER_SIZE": "0",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_MR_CACHE_MONITOR": "userfaultfd",
}
NODE_OF = {1: (0, 0, 0, 0), 2: (0, 0, 1, 1)}


def log(messages: str, nodes: int = 2, level: str = "INFO") -> NcclLog:
    lines = [f"nid001:4242:4711 [1] NCCL {level} {message}" for message in messages.strip().splitlines()]
    return parse_log("\n".join(["nid001:4242:4711 [1] something else", *lines]), NODE_OF[nodes])


def wrong(findings: list[Finding], needed: bool = False) -> dict[str, str]:
    """What is wrong, by name; every line has something to add."""
    found = {it.name: it.wrong for it in findings if it.wrong is not None}
    assert all(re.search(r"`[^`]+`", line) for line in found.values()), found
    assert all(it.needed == needed for it in findings if it.wrong is not None)
    return found


def network(
    parsed: NcclLog, *adapters: str, expected: str | None = None, nodes: int = 2, **environ: str
) -> list[Finding]:
    return list(network_findings(parsed, adapters, expected, environ, nodes))


def test_slingshot_with_its_plugin() -> None:
    parsed = log(SLINGSHOT)
    assert (parsed.version, parsed.provider, parsed.libfabric) == ("2.27.7+cuda12.9", "cxi", "1.22")
    findings = network(parsed, "cxi", expected="OFI", **CSCS)  # another name of the same plugin
    assert wrong(findings) == {}
    assert findings[0].found == (
        "AWS Libfabric (aws-ofi-nccl 1.14.2, provider cxi); between nodes NET/AWS Libfabric/GDRDMA; on a node P2P/CUMEM"
    )
    assert findings[1].found == "2 of 2 connections between nodes"


def test_settings_of_slingshot_are_the_lines_to_add() -> None:
    found = wrong(
        network(log(SLINGSHOT), **CSCS | {"FI_CXI_RDZV_THRESHOLD": "16384", "FI_MR_CACHE_MONITOR": "memhooks"})
    )
    assert found.keys() == {"eager messages", "MR cache"}
    assert found["eager messages"].endswith("`export FI_CXI_RDZV_THRESHOLD=0`")
    assert found["MR cache"].endswith("`export FI_MR_CACHE_MONITOR=userfaultfd`")
    assert len(wrong(network(log(SLINGSHOT), "cxi"))) == 4, "all topics, where nothing is set"
    assert wrong(network(log(SLINGSHOT, 1), "cxi", nodes=1)) == {}, "one node does not use them"
    larger = CSCS | {"FI_CXI_DEFAULT_CQ_SIZE": "262144", "FI_MR_CACHE_MONITOR": "kdreg2"}
    assert wrong(network(log(SLINGSHOT), "cxi", **larger)) == {}


def test_tcp_on_slingshot_is_named() -> None:
    (line,) = wrong(network(log(SLINGSHOT_ON_TCP), "cxi", **CSCS)).values()
    assert line.startswith("NCCL uses TCP between nodes") and '`export NCCL_NET="AWS Libfabric"`' in line
    assert wrong(network(log(SLINGSHOT_ON_TCP))) == {}, "a cluster whose only network is Ethernet"
    nvlink = "Using network Socket\nChannel 00/0 : 1[1] -> 2[0] via P2P/MNNVL"
    assert wrong(network(log(nvlink), "ib")) == {}, "NVLink between nodes"
    (line,) = wrong(network(log(SLINGSHOT_ON_TCP), expected="Libfabric"), needed=True).values()
    assert "the site file expects Libfabric" in line and '`export NCCL_NET="Libfabric"`' in line


def test_tcp_inside_libfabric_is_named() -> None:
    parsed = log(SLINGSHOT.replace("provider is cxi, fabric is cxi", "provider is tcp;ofi_rxm, fabric is 10.0.0.0/8"))
    (line,) = wrong(network(parsed, "cxi", **CSCS)).values()
    assert "TCP" in line and "`export FI_PROVIDER=cxi`" in line


def test_infiniband_with_gpu_direct() -> None:
    findings = network(log(INFINIBAND), "ib", expected="IB")
    assert wrong(findings) == {} and findings[1].found == "1 of 2 connections between nodes"
    assert "on a node SHM/direct" in findings[0].found
    assert wrong(network(log(INFINIBAND.replace("network IB", "network IBext_v9")), "ib", expected="IB")) == {}
    (line,) = wrong(network(log(SLINGSHOT_ON_TCP), "ib", NCCL_IB_DISABLE="1")).values()
    assert line.endswith("`export NCCL_IB_DISABLE=0`")


def test_infiniband_without_gpu_direct() -> None:
    far = wrong(network(log(INFINIBAND_THROUGH_HOST), "ib"))
    assert far.keys() == {"GPUDirect"} and "`export NCCL_NET_GDR_LEVEL=PHB`" in far["GPUDirect"]
    no_driver = log(INFINIBAND_THROUGH_HOST + "NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n")
    assert "nvidia-peermem" in wrong(network(no_driver, "ib"))["GPUDirect"]


def test_one_node_needs_no_network() -> None:
    (finding,) = network(log(ONE_NODE, 1), "ib", expected="IB", nodes=1)
    assert finding == Finding("network", "Socket; on a node P2P/CUMEM, P2P/IPC")


def test_rccl() -> None:
    parsed = log(RCCL)
    assert (parsed.version, parsed.provider) == ("2.21.5-HEAD", "cxi")
    assert (dict(parsed.inside), dict(parsed.between)) == ({"P2P/IPC": 1}, {"NET/AWS Libfabric/GDRDMA": 1})
    assert wrong(network(parsed, "cxi", **CSCS)) == {}


def test_ranks_are_joined_and_their_versions_compared() -> None:
    one, other = log(SLINGSHOT), log(SLINGSHOT_ON_TCP)
    assert joined([one, other]).between == {"NET/AWS Libfabric/GDRDMA": 2, "NET/Socket": 1}
    differing = {name for name, version in nccl_versions(one).items() if version != nccl_versions(other)[name]}
    assert {"NCCL", "NCCL's network", "NCCL's libfabric"} <= differing


def test_an_error_of_nccl_is_one_line() -> None:
    missing = log("Error: network AWS Libfabric not found.", level="WARN")
    advice = error_advice(missing) or ""
    assert advice.startswith("NCCL failed: Error: network AWS Libfabric not found; ") and "`unset NCCL_NET" in advice
    assert error_advice(log(SLINGSHOT)) is None
    assert "Error: network" in {it.name: it.wrong for it in network(missing)}["NCCL's warnings"]


def test_bandwidth_is_compared_with_the_site_file() -> None:
    expected = read_expected(
        {"HPCRL_FABRIC_NET": "IB", "HPCRL_FABRIC_ALL_REDUCE": "40", "HPCRL_FABRIC_POINT_TO_POINT": ""}
    )
    assert expected == Expected("IB", 40e9, None)
    slow = wrong(list(rate_findings(expected, Rates(30e9, 1e9, (0, 4)), 8)))
    assert slow.keys() == {"all-reduce"} and slow["all-reduce"].startswith("75% of what the site file expects")
    assert wrong(list(rate_findings(expected, Rates(33e9, 1e9, (0, 4)), 8))) == {}
    with pytest.raises(InputError, match=r"found HPCRL_FABRIC_ALL_REDUCE=fast; expected GB/s"):
        read_expected({"HPCRL_FABRIC_ALL_REDUCE": "fast"})


def test_gpu_aware_mpi_beside_nccl_is_a_note() -> None:
    cray, enabled = "MPI VERSION    : CRAY MPICH version 8.1.28.15", {"MPICH_GPU_SUPPORT_ENABLED": "1"}
    assert "deadlock" in wrong(list(gpu_support_findings(enabled, cray)))["GPU-aware MPI"]
    assert list(gpu_support_findings({"MPICH_GPU_SUPPORT_ENABLED": "0"}, cray)) == []
    assert list(gpu_support_findings(enabled, "MPICH Version: 5.0.2")) == []


GOOD = NodeState(("ib",), {"memlock": (-1, -1), "nofile": (4096, 4096), "nproc": (4096, -1)}, 8 * GIB, "madvise", True)


def test_limits_and_memory_of_nodes_are_named_with_the_node() -> None:
    def found(bad: NodeState, needed: bool = False) -> dict[str, str]:
        return wrong(list(state_findings(["n0", "n1"], [GOOD, bad], [8, 8])), needed)

    assert found(GOOD) == {}
    low = NodeState(("ib",), {"memlock": (65536, -1), "nofile": (256, 300), "nproc": (100, -1)}, 8 * GIB, "never", True)
    lines = found(low)
    assert lines.keys() == {"limits", "huge pages"} and all(line.endswith("(on n1)") for line in lines.values())
    for line in ("`ulimit -l unlimited`", "`ulimit -u 2048`", "its hard limit is 300, 320 is needed: `#SBATCH --prop"):
        assert line in lines["limits"]
    assert found(NodeState((), {"memlock": (65536, 65536)}, 8 * GIB)) == {}, "without an adapter nothing is locked"
    small = found(NodeState(shared_memory=GIB // 2, has_gpus=True))
    assert small.keys() == {"/dev/shm"} and "--shm-size=1g" in small["/dev/shm"]
    (tiny,) = [it for it in state_findings(["n1"], [NodeState(shared_memory=2**26)], [8]) if it.wrong]
    assert tiny.needed and "too small for this many ranks" in (tiny.wrong or "")


def test_adapters_are_those_with_an_active_port(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("rdmap0s1", "1: DOWN")):
        (tmp_path / "class/infiniband" / name / "ports/1").mkdir(parents=True)
        (tmp_path / "class/infiniband" / name / "ports/1/state").write_text(state)
    assert find_adapters(str(tmp_path)) == ("ib",)
    (tmp_path / "class/cxi/cxi0").mkdir(parents=True)
    assert find_adapters(str(tmp_path)) == ("cxi", "ib")


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **gpu) { *gpu = (void *)id; return id[0] != '0'; }
int nvmlDeviceGetClockInfo(void *gpu, int kind, unsigned *mhz) { *mhz = 1200 + kind; return 0; }
int nvmlDeviceGetMaxClockInfo(void *gpu, int kind, unsigned *mhz) { *mhz = 1980; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *why) { *why = 0x44; return 0; }
"""


def test_a_throttled_gpu_is_named_with_its_node(tmp_path: Path) -> None:
    library = str(tmp_path / "libnvidia-ml.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, "-x", "c", "-"], input=NVML, text=True, check=True)
    hot = gpu_clock("0000:17:00.0", library)
    assert hot == GpuClock(1201, 1980, 0x44) and gpu_clock("none", library) is None
    assert gpu_clock("0000:17:00.0", str(tmp_path / "absent.so")) is None
    capped = GpuClock(1500, 1980, 0x04)  # a power cap is usual
    (line,) = wrong(list(clock_findings(["n0", "n1"], [capped, hot]))).values()
    assert line == "throttled: too hot (hardware) (on n1); `#SBATCH --exclude=n1`"
    assert wrong(list(clock_findings(["n0", "n1"], [capped, capped]))) == {}
    assert list(clock_findings(["n0"], [None])) == []
