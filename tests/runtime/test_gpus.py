"""Which GPU a rank has, what keeps a job from running on it, and what a job on GPUs sets before torch starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from hpcrl.config.schema import Config
from hpcrl.kernels import chips, dispatch, grouped_experts
from hpcrl.machine.check import gpu_finding
from hpcrl.runtime import gpus
from hpcrl.runtime.exits import InputError
from hpcrl.runtime.gpus import FoundGpus, Gpu
from hpcrl.runtime.world import use_expandable_segments

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
H100 = Gpu("NVIDIA H100 80GB HBM3", "sm_90", ARCHS)
T4 = Gpu("Tesla T4", "sm_75", ARCHS)
V100 = Gpu("Tesla V100-SXM2-16GB", "sm_70", ARCHS)
MI250X = Gpu("AMD Instinct MI250X", "gfx90a", ("gfx90a", "gfx942"))
OLD_DRIVER = FoundGpus(8, 0, "13.0", driver_cuda=(12, 4), problem="The NVIDIA driver on your system is too old")


def test_a_node_whose_gpus_cannot_be_used_is_no_cpu() -> None:
    with pytest.raises(InputError, match="8 GPUs, .*supports CUDA 12.4 at most.*built for 13.0; update the driver"):
        gpus.check_usable(OLD_DRIVER)
    with pytest.raises(InputError, match="1 GPU, but .*libcuda.so.1 is missing"):
        gpus.check_usable(FoundGpus(1, 0, "13.0"))
    hidden = FoundGpus(4, 0, "12.8", {"CUDA_VISIBLE_DEVICES": "7"}, (12, 4), "No CUDA GPUs are available")
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES=7 .No CUDA GPUs are available.; ask the batch system"):
        gpus.check_usable(hidden)


@pytest.mark.parametrize(
    "found",
    [
        FoundGpus(8, 8, "13.0"),
        FoundGpus(0, 0, "13.0"),  # a login node
        FoundGpus(8, 0, None),
        *(replace(OLD_DRIVER, visible={"CUDA_VISIBLE_DEVICES": none}) for none in ("", "-1", "NoDevFiles")),
    ],
)
def test_the_cpu_is_used_where_it_is_chosen_or_there_is_no_gpu(found: FoundGpus) -> None:
    gpus.check_usable(found)


def test_a_torch_for_the_cpu_on_a_node_with_gpus_is_logged() -> None:
    assert "built for the CPU; the GPUs of this node (8)" in (gpus.unused(FoundGpus(8, 0, None)) or "")
    assert gpus.unused(FoundGpus(0, 0, None)) is None and gpus.unused(FoundGpus(8, 8, "13.0")) is None


def check(gpu: Gpu, *, bfloat16: bool = True, triton: bool = True, **environ: str) -> None:
    gpus.check_gpu(gpu, needs_bfloat16=bfloat16, environ=environ, has_triton=triton)


def test_a_gpu_that_is_too_old_is_an_error() -> None:
    check(H100)
    check(T4, bfloat16=False)
    with pytest.raises(InputError, match="Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0 .*model.dtype"):
        check(T4)
    with pytest.raises(InputError, match="V100.* capability 7.0, which this torch has no kernels for .sm_75, "):
        check(V100, bfloat16=False)


@pytest.mark.parametrize(
    "architecture, arch, runs",
    [
        ("sm_86", "sm_80", True),
        ("sm_80", "sm_86", False),
        ("sm_90", "sm_80", False),
        ("sm_90", "compute_80", True),
        ("sm_70", "compute_80", False),
        ("sm_90", "sm_90a", True),
        ("sm_121", "sm_120", True),
        ("sm_121", "sm_120a", False),
        ("sm_90", "gfx942", False),
        ("gfx942", "sm_90", False),
        ("gfx942", "gfx942:sramecc+", True),
        ("gfx90a", "gfx942", False),
    ],
)
def test_architectures_that_a_gpu_runs(architecture: str, arch: str, runs: bool) -> None:
    assert gpus.runs_on(architecture, arch) == runs


def test_triton_is_needed_on_gpus_unless_a_user_does_without() -> None:
    check(H100, triton=False, HPCRL_KERNELS="torch")
    for environ in ({}, {"HPCRL_KERNELS": "triton"}):
        with pytest.raises(
            InputError, match="Triton is not installed.*`pip install triton`, or set HPCRL_KERNELS=torch"
        ):
            check(H100, triton=False, **environ)


def test_check_shows_the_same() -> None:
    old = gpu_finding(OLD_DRIVER, [])
    assert old.needed and old.wrong == gpus.unusable(OLD_DRIVER)
    login = gpu_finding(FoundGpus(0, 0, "13.0"), [])
    assert login.wrong and not login.needed
    mixed = gpu_finding(FoundGpus(3, 3, "13.0"), [H100, H100, T4])
    assert mixed.found == "13.0, 2 x NVIDIA H100 80GB HBM3 (9.0), 1 x Tesla T4 (7.5)"
    assert mixed.wrong == gpus.lacks_bfloat16(T4) and not mixed.needed
    refused = gpu_finding(FoundGpus(1, 1, "13.0"), [V100])
    assert refused.wrong == gpus.too_old(V100) and refused.needed
    assert gpu_finding(FoundGpus(2, 2, "13.0"), [H100, H100]).wrong is None


def test_amds_gpus_are_found_and_named(tmp_path: Path) -> None:
    for node, gpu_id in enumerate(("0", "0", "49421", "4589")):  # two CPUs come first
        folder = tmp_path / "class/kfd/kfd/topology/nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
    assert gpus.amd_devices(str(tmp_path)) == 2 and gpus.amd_devices("/nowhere") == 0

    check(MI250X)
    used = gpu_finding(FoundGpus(8, 8, "7.2", toolkit=gpus.ROCM, vendor="AMD"), [MI250X] * 8)
    assert (used.name, used.found, used.wrong) == ("ROCm", "7.2, 8 x AMD Instinct MI250X (gfx90a)", None)
    with pytest.raises(
        InputError, match="MI250X has architecture gfx90a, which this torch has no kernels for .gfx1100."
    ):
        check(replace(MI250X, wheel_archs=("gfx1100",)))


def test_the_toolkit_of_torch_and_the_vendor_of_the_gpus_are_compared() -> None:
    here = FoundGpus(8, 0, "7.2", {"ROCR_VISIBLE_DEVICES": "9"}, problem="no device", toolkit=gpus.ROCM, vendor="AMD")
    with pytest.raises(
        InputError, match="ROCR_VISIBLE_DEVICES=9 .no device.; .* try rocm-smi, .* HIP_VISIBLE_DEVICES=-1"
    ):
        gpus.check_usable(here)
    gpus.check_usable(replace(here, visible={"HIP_VISIBLE_DEVICES": "-1"}))
    with pytest.raises(InputError, match="they are AMD's, and torch is built for CUDA 13.0; install .* built for AMD"):
        gpus.check_usable(FoundGpus(8, 0, "13.0", vendor="AMD"))


@pytest.mark.parametrize(
    ("name", "numbers", "flash_attention", "fp8", "shared_kib"),
    [
        ("gfx90a:sramecc+:xnack-", (9, 0), 2, "", 64),
        ("gfx942:sramecc+:xnack-", (9, 4), 2, "float8_e4m3fnuz", 64),
        ("gfx950", (9, 5), 2, "float8_e4m3fn", 160),
        ("gfx1100", (11, 0), 0, "", 64),
        (None, (9, 0), 3, "float8_e4m3fn", 227),
        (None, (8, 0), 2, "", 163),
    ],
)
def test_numbers_of_rocm_are_not_taken_for_nvidias(
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    numbers: tuple[int, int],
    flash_attention: int,
    fp8: str,
    shared_kib: int,
) -> None:
    """ROCm's torch has the device type "cuda", and compute capabilities that look like Hopper's."""
    monkeypatch.setattr(torch.version, "hip", name and "7.2.53211")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: numbers)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    device = torch.device("cuda")
    chip = chips.chip_of.__wrapped__(device)
    assert (chip.flash_attention, chip.fp8, chip.shared_bytes) == (flash_attention, fp8, shared_kib * 1024)
    assert chip.vendor == ("AMD" if name else "NVIDIA") and chip.grouped_product == (flash_attention == 3)
    monkeypatch.setattr(dispatch, "chip_of", chips.chip_of.__wrapped__)
    assert dispatch.has_fp8.__wrapped__(device) == (fp8 == "float8_e4m3fn")
    monkeypatch.setattr(grouped_experts, "chip_of", chips.chip_of.__wrapped__)
    if name:  # others ask torch for a product
        assert not grouped_experts._has_grouped_product.__wrapped__(device, torch.bfloat16)
    sampling = pytest.importorskip("hpcrl.kernels.sampling_triton")
    assert ("maxnreg" in sampling.bound_options(chip)) == (name is None)  # AMD's compiler does not have this option


def test_dtypes_of_a_job_are_those_of_all_its_models() -> None:
    assert Config.model_validate({}).dtypes == {"float32"}
    assert Config.model_validate({"rollout": {"dtype": "bfloat16"}}).dtypes == {"float32", "bfloat16"}
    assert "bfloat16" in Config.model_validate({"teacher": {"model": {"dtype": "bfloat16"}}}).dtypes


def test_pci_ids_are_written_as_in_sysfs() -> None:
    assert gpus.pci_id(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)) == "0000:1b:00.0"
    assert gpus.pci_id(SimpleNamespace()) == ""


def test_all_ranks_have_gpus_or_none_has() -> None:
    gpus.check_all_or_none([0, 0])
    gpus.check_all_or_none([4, 8])
    with pytest.raises(InputError, match="rank 1 can use no GPU, and rank 0 can"):
        gpus.check_all_or_none([4, 0, 4])


def test_two_ranks_on_one_gpu_are_an_error() -> None:
    gpus.check_own_gpus(["a", "b", "c"])
    with pytest.raises(InputError, match="ranks 1 and 3 have the same GPU .b., .* HPCRL_SHARE_GPU=1"):
        gpus.check_own_gpus(["a", "b", "c", "b"])


def test_a_timeout_of_nothing_is_refused() -> None:
    assert Config.model_validate({}).run.nccl_timeout == 1800
    with pytest.raises(ValidationError, match="greater than 0"):
        Config.model_validate({"run": {"nccl_timeout": 0}})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_of_memory_grow_unless_the_user_says_how(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {name: "max_split_size_mb:64"}
    use_expandable_segments(theirs)
    assert {key: value for key, value in theirs.items() if "ALLOC" in key} == {name: "max_split_size_mb:64"}
    default: dict[str, str] = {}
    use_expandable_segments(default)
    assert default["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setattr(gpus, "amd_devices", lambda: 8)
    on_amd: dict[str, str] = {}
    use_expandable_segments(on_amd)
    assert not on_amd
