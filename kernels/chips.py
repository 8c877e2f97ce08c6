"""What GPUs can do, by the names of their architectures: sm_90 of NVIDIA's, gfx942 of AMD's.

ROCm's torch calls its devices "cuda", too, and gives them numbers that look like NVIDIA's: an MI250X has compute
capability 9.0 there, as an H100, and an MI300X 9.4. So what a GPU can do is never read from these numbers. Torch is
imported only where a device is given.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

KIB = 1024
INTERPRETED = "sm_90"  # the chip whose constants Triton's interpreter gets
# Of a program, by compute capability; others have 99 KiB, or 64 KiB before 8.0.
SHARED_BYTES = dict.fromkeys([(8, 0), (8, 7)], 163 * KIB) | dict.fromkeys([(9, 0), (10, 0), (10, 3)], 227 * KIB)


class Chip(NamedTuple):
    """What a GPU can do.

    shared_bytes: the most shared memory of a program (AMD: LDS). flash_attention: the newest version of FlashAttention
    that libraries have for it; 0: none.
    lower_right: whether torch's fused attention has the causal mask of a sequence's last queries; AMD's libraries
    align causal masks at the first key. grouped_product: whether torch multiplies groups of bf16 matrices in one
    launch, for which the host does not wait. fp8: torch's name of the dtype of 8-bit products, empty without them.
    """

    name: str
    vendor: Literal["NVIDIA", "AMD"]
    warp_size: int
    shared_bytes: int
    bfloat16: bool = True
    flash_attention: int = 0
    lower_right: bool = False
    grouped_product: bool = False
    fp8: str = ""


# On AMD torch multiplies the groups one after the other, unless ROCM_ALLOW_GROUP_GEMM_CK is set: not run.
AMD = {
    "gfx90a": Chip("gfx90a", "AMD", 64, 64 * KIB, flash_attention=2),
    "gfx942": Chip("gfx942", "AMD", 64, 64 * KIB, flash_attention=2, fp8="float8_e4m3fnuz"),
    "gfx950": Chip("gfx950", "AMD", 64, 160 * KIB, flash_attention=2, fp8="float8_e4m3fn"),
}


def chip(name: str) -> Chip:
    """Return the chip with this architecture. An AMD chip that is not listed has what all have."""
    if name.startswith("gfx"):
        return AMD.get(name) or Chip(name, "AMD", 64 if name.startswith("gfx9") else 32, 64 * KIB)
    version = capability(name)
    is_ampere = version >= (8, 0)
    return Chip(
        name,
        "NVIDIA",
        warp_size=32,
        shared_bytes=SHARED_BYTES.get(version, 99 * KIB if is_ampere else 64 * KIB),
        bfloat16=is_ampere,
        flash_attention=3 if version[0] == 9 else 2 * is_ampere,
        lower_right=True,
        grouped_product=version[0] in (9, 10),
        fp8="float8_e4m3fn" if version >= (8, 9) else "",
    )


def capability(name: str) -> tuple[int, int]:
    """Return the compute capability of one of NVIDIA's architectures: (9, 0) of sm_90."""
    found = re.fullmatch(r"sm_(\d+)(\d)", name)
    if found is None:
        raise ValueError(f"architecture {name} is unknown; expected a name such as sm_90 or gfx942")
    return int(found[1]), int(found[2])


def architecture(device: torch.device | int) -> str:
    """Return the name of a GPU's architecture."""
    import torch

    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName  # such as gfx942:sramecc+:xnack-
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """Return the chip of a device; on the CPU the one whose constants Triton's interpreter gets."""
    return chip(architecture(device) if device.type == "cuda" else INTERPRETED)
