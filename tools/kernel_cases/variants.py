"""Machine code of the kernels: registers and memory of each variant, compiled for GPUs that need not be present."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpcrl.kernels import (
    checksum_triton,
    decode_attention_triton,
    exact_triton,
    fp8_matrix_triton,
    grouped_experts_triton,
    layers_triton,
    linear_log_prob_triton,
    pack_triton,
    sampling_triton,
    store_heads_triton,
)
from hpcrl.kernels.chips import Chip, capability

CHIPS = {"sm_80": "A100", "sm_90": "H100, H200", "sm_100": "B200", "gfx90a": "MI250X", "gfx942": "MI300X"}


class Resources(NamedTuple):
    registers: int  # of a thread
    shared_bytes: int  # of a program
    spilled_bytes: int  # of a thread


@dataclass(frozen=True)
class KernelVariant:
    """A Triton kernel with everything that its machine code depends on.

    signature: argument -> Triton's name of its type. Pointers and arguments ending with `stride` are assumed to be
    multiples of 16, as for large tensors. constants: the kernel's constexprs.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int | None = None  # None: what Triton chooses for the chip
    maxnreg: int | None = None  # maximum registers of a thread
    has_fp8: bool = False  # numbers in float8_e4m3fn

    def runs_on(self, chip: Chip) -> bool:
        return not self.has_fp8 or chip.fp8 == "float8_e4m3fn"

    def compile(self, chip: Chip) -> Resources:
        """Needs no GPU; Triton's interpreter must be off."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        order = [name for name in self.kernel.arg_names if name not in self.constants]
        if sorted(order) != sorted(self.signature):
            raise ValueError(f"{self.name}: the arguments are {order}, but the signature has {[*self.signature]}")
        source = ASTSource(
            fn=self.kernel,
            signature={name: self.signature.get(name, "constexpr") for name in self.kernel.arg_names},
            constexprs=self.constants,
            attrs={
                (index,): [["tt.divisibility", 16]]
                for index, name in enumerate(self.kernel.arg_names)
                if self.signature.get(name, "").startswith("*") or name.endswith("stride")
            },
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}
        options = {name: value for name, value in options.items() if value is not None}
        if chip.vendor == "AMD":
            compiled = triton.compile(source, target=GPUTarget("hip", chip.name, chip.warp_size), options=options)
            return amd_resources(compiled.asm["amdgcn"])._replace(shared_bytes=compiled.metadata.shared)
        major, minor = capability(chip.name)
        target = GPUTarget("cuda", 10 * major + minor, chip.warp_size)
        compiled = triton.compile(source, target=target, options=options)
        return resources(compiled.asm["cubin"])._replace(shared_bytes=compiled.metadata.shared)


def amd_resources(assembly: str) -> Resources:
    """Read registers and memory from the metadata at the end of AMD's assembly."""
    numbers = {key: int(value) for key, value in re.findall(r"^\s*\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    spilled = max(numbers["private_segment_fixed_size"], 4 * numbers["vgpr_spill_count"])
    return Resources(numbers["vgpr_count"], numbers["group_segment_fixed_size"], spilled)


def resources(cubin: bytes) -> Resources:
    """Read registers and memory by the disassembler in Triton's package."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", output)}
    return Resources(numbers["REG"], numbers["SHARED"], numbers["STACK"] + numbers["LOCAL"])


def _decode_attention_variants(chip: Chip) -> list[KernelVariant]:
    """Heads of 128 and of 64 with 4 queries each, and latent attention with 16 queries; caches in bf16 and 8 bits."""
    variants = []
    for groups, per_head, key, value, bits in (
        (8, 4, 128, 128, 16),
        (8, 4, 64, 64, 16),
        (1, 16, 576, 512, 16),
        (8, 4, 128, 128, 8),
        (1, 16, 576, 512, 8),
    ):
        launch = decode_attention_triton.attend_launch(
            groups, per_head, key, value, value, key > value, 32, bits // 8, chip.shared_bytes
        )
        cached = dict.fromkeys(("keys", "values"), "*bf16" if bits == 16 else "*fp8e4nv")
        inputs = {"queries": "*bf16"} | cached | dict.fromkeys(("blocks", "parts"), "*i32")
        temporary = dict.fromkeys(("totals", "maxima", "sums"), "*fp32")
        name = f"decode_attention {per_head} x {key}/{value}" + (" in 8 bits" if bits == 8 else "")
        variants.append(
            KernelVariant(
                name,
                decode_attention_triton.attend,
                inputs | temporary | {"scale": "fp32"},
                launch.constants,
                launch.num_warps,
                has_fp8=bits == 8,
            )
        )
        if bits == 8:
            continue
        launch = decode_attention_triton.combine_launch(groups, per_head, value)
        pointers = temporary | {"parts_of": "*i32", "sinks": "*bf16", "outputs": "*bf16"}
        constants = {**launch.constants, "HAS_SINKS": key == 64}
        variants.append(
            KernelVariant(f"{name} combine", decode_attention_triton.combine, pointers, constants, launch.num_warps)
        )
    pointers = dict.fromkeys(("starts", "lengths", "num_rows", "parts", "parts_of"), "*i32")
    integers = dict.fromkeys(("n", "num_parts", "num_wanted", "least"), "i32")
    sizes = {"SIZE": 32, "ROWS": 1024}
    variants.append(
        KernelVariant("decode_attention cut", decode_attention_triton.cut_kernel, pointers | integers, sizes)
    )
    return variants


def _exact_product_variants() -> list[KernelVariant]:
    """A layer's product, the head of 151,936 outputs in fp32, and a layer's product in fp32."""
    variants = []
    for columns, dtype, out in (
        (1536, torch.bfloat16, "bf16"),
        (151936, torch.bfloat16, "fp32"),
        (1536, torch.float32, "fp32"),
    ):
        sizes, num_warps = exact_triton.launch(columns, dtype.itemsize)
        operand = "bf16" if dtype is torch.bfloat16 else "fp32"
        pointers = {"x": f"*{operand}", "weight": f"*{operand}", "y": f"*{out}", "rows": "i32"}
        name = f"exact_product {columns} {operand} to {out}"
        constants = sizes | {"COLUMNS": columns, "TERMS": 1536}
        variants.append(KernelVariant(name, exact_triton.multiply, pointers, constants, num_warps))
    return variants


def _exact_attention_variants(chip: Chip) -> list[KernelVariant]:
    """Qwen2.5's heads, in fp32 too, Qwen3's, narrow and wide ones."""
    variants = []
    cases = (2, 6, 128, 10, 2), (8, 4, 128, 16, 2), (8, 4, 64, 16, 2), (1, 8, 256, 8, 2), (2, 6, 128, 2, 4)
    for groups, per_head, width, tokens, itemsize in cases:
        constants = exact_triton.constants(groups, per_head, width, 32, itemsize, tokens, chip.shared_bytes)
        operand = "bf16" if itemsize == 2 else "fp32"
        pointers = dict.fromkeys(("queries", "keys", "values", "outputs"), f"*{operand}")
        pointers |= dict.fromkeys(("blocks", "tiles"), "*i32") | {"scale": "fp32"}
        name = f"exact_attention {per_head} of {width} {operand}"
        options = exact_triton.options(width)
        variants.append(KernelVariant(name, exact_triton.attend, pointers, constants, **options))
    return variants


def _rms_norm_variants() -> list[KernelVariant]:
    """Rows of 128 (a head), of 4096 (a layer) and the widest."""
    variants = []
    for width in (128, 4096, 8192):
        tile = layers_triton.NormTile.of(width)
        sizes = {"WIDTH": width, "ROWS": tile.rows, "BLOCK": tile.block}
        pointers = dict.fromkeys(("x", "residual", "weight", "y"), "*bf16") | {"rstd": "*fp32"}
        variants.append(
            KernelVariant(
                f"rms_norm forward {width}",
                layers_triton.rms_norm_forward,
                pointers | {"rows": "i32", "stride": "i32", "eps": "fp32"},
                sizes | {"ADD": True},
                tile.num_warps,
            )
        )
        pointers = dict.fromkeys(("x", "weight", "dy", "dx"), "*bf16") | dict.fromkeys(("rstd", "dw"), "*fp32")
        integers = dict.fromkeys(("rows", "stride", "each"), "i32")
        variants.append(
            KernelVariant(
                f"rms_norm backward {width}",
                layers_triton.rms_norm_backward,
                pointers | integers,
                sizes,
                tile.num_warps,
            )
        )
    return variants


def _swiglu_variants() -> list[KernelVariant]:
    """A dense layer's width, and an expert's, of which a program has two rows."""
    variants = []
    for width in (768, 14336):
        tile = layers_triton.SwiGLUTile.of(width)
        sizes = {"WIDTH": width, "ROWS": tile.rows, "BLOCK": tile.block}
        integers = {"rows": "i32", "stride": "i32"}
        sizes["WEIGHTED"] = width == 768
        for kernel, names in (
            (layers_triton.swiglu_forward, ("x", "y")),
            (layers_triton.swiglu_backward, ("x", "dy", "dx")),
        ):
            name = "forward" if kernel is layers_triton.swiglu_forward else "backward"
            pointers = dict.fromkeys(names, "*bf16") | {"weights": "*fp32"}
            pointers |= {"dw": "*fp32"} if name == "backward" else {}
            variants.append(KernelVariant(f"swiglu {name} {width}", kernel, pointers | integers, sizes))
    return variants


def _expert_gradients_variants() -> list[KernelVariant]:
    """Both matrices of a narrow expert."""
    pointers = {"grad": "*bf16", "a": "*bf16", "ends": "*i32", "sums": "*fp32"}
    tiles = {"TILE": grouped_experts_triton.TILE, "ROWS": grouped_experts_triton.ROWS}
    kernel = grouped_experts_triton.expert_gradients
    return [
        KernelVariant(f"expert_gradients {m} x {k}", kernel, pointers | {"stride": "i64"}, {"M": m, "K": k} | tiles, 8)
        for m, k in ((1536, 1024), (1024, 768))
    ]


def _rope_variants() -> list[KernelVariant]:
    """Queries and keys of 8 groups in a mixed matrix, keys only, and narrow heads that are not a power of 2."""
    variants = []
    for groups, heads, head_dim in ((8, 5, 128), (1, 8, 128), (1, 16, 96)):
        tile = layers_triton.RopeTile.of(groups * heads, head_dim // 2)
        variants.append(
            KernelVariant(
                f"rope {groups} x {heads} heads of {head_dim}",
                layers_triton.rotate,
                {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "y": "*bf16", "tokens": "i32"}
                | dict.fromkeys(("token_stride", "group_stride", "head_stride"), "i32"),
                {"BACK": False, "GROUPS": groups, "HEADS": heads, "HALF": head_dim // 2}
                | {"BLOCK_TOKENS": tile.tokens, "BLOCK_HEADS": tile.heads, "BLOCK": tile.block},
            )
        )
    return variants


def _checksum_variants() -> list[KernelVariant]:
    """A matrix that is rounded first, and a vector as one column."""
    variants = []
    for name, width in (("bf16", 1536), ("fp32", 1536), ("fp32", 1)):
        numbers = dict.fromkeys(("height", "width", "stride"), "i32") | dict.fromkeys(("row", "col"), "i64")
        pointers = {"total": "*i64", "values": f"*{name}"}
        sizes = checksum_triton.constants(width, torch.bfloat16)
        title = f"checksum {name} {width} wide"
        variants.append(KernelVariant(title, checksum_triton.add, pointers | numbers, sizes))
    return variants


def _fp8_matrix_variants() -> list[KernelVariant]:
    """The inputs of the 1.5B shape's products."""
    return [
        KernelVariant(
            f"fp8_matrix rows of {cols}",
            fp8_matrix_triton.quantize,
            {"values": "*bf16", "numbers": "*fp8e4nv", "scales": "*fp32", "stride": "i32", "cols": "i32"},
            fp8_matrix_triton.constants(cols),
            has_fp8=True,
        )
        for cols in (1536, 8960)
    ]


def _store_heads_variants() -> list[KernelVariant]:
    """Qwen2.5's heads, with a bias, and Qwen3's, with norms, also to a cache in 8 bits."""
    variants = []
    for groups, per_head, bias, cached in ((2, 6, True, "bf16"), (8, 4, False, "bf16"), (8, 4, False, "fp8e4nv")):
        names = ("mixed", "bias", "query_norm", "key_norm", "queries")
        pointers = dict.fromkeys(names, "*bf16") | dict.fromkeys(("keys", "values"), f"*{cached}")
        pointers |= dict.fromkeys(("cos", "sin"), "*fp32")
        sizes = {"BIAS": bias, "NORM": not bias} | store_heads_triton.constants(groups, per_head, 128, 32)
        numbers = dict.fromkeys(("blocks", "offsets"), "*i64") | {"stride": "i32", "eps": "fp32"}
        title = f"store_heads {groups} x {per_head} of 128" + (" in 8 bits" if cached != "bf16" else "")
        variants.append(
            KernelVariant(title, store_heads_triton.store, pointers | numbers, sizes, has_fp8=cached != "bf16")
        )
    return variants


def _linear_log_prob_variants() -> list[KernelVariant]:
    rows = dict.fromkeys(("top", "total", "weighted", "squares", "at_targets"), "*fp32")
    integers = dict.fromkeys(("stride", "first", "columns", "num_targets"), "i32") | {"temperature": "fp32"}
    grads = dict.fromkeys(("top", "log_sum", "entropies", "grad_log_probs", "grad_entropies"), "*fp32")
    return [
        KernelVariant(
            "linear_log_prob add_columns",
            linear_log_prob_triton.add_columns,
            {"logits": "*fp32", "targets": "*i64"} | rows | integers,
            {"ENTROPY": True, "SQUARES": True, "TARGETS": 1, "BLOCK": linear_log_prob_triton.BLOCK},
        ),
        KernelVariant(
            "linear_log_prob row_sums",
            linear_log_prob_triton.add_columns,
            {"logits": "*fp32", "targets": "*i64"} | rows | integers,
            {"ENTROPY": False, "SQUARES": False, "TARGETS": 1, "BLOCK": linear_log_prob_triton.BLOCK},
        ),
        KernelVariant(
            "linear_log_prob logits_gradient",
            linear_log_prob_triton.logits_gradient,
            {"logits": "*fp32", "grad": "*bf16", "targets": "*i64", "grad_stride": "i32"} | grads | integers,
            {"LOG_PROBS": True, "ENTROPY": True, "BLOCK": linear_log_prob_triton.BLOCK},
        ),
    ]


def _pack_variants() -> list[KernelVariant]:
    """Copies within bf16 and from fp32 to it, with the widest access and number by number, and to 8 bits."""
    variants = []
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for source, rounded, destination, vector in (
        (bf16, None, bf16, 8),
        (torch.float32, None, bf16, 8),
        (torch.float32, None, torch.float32, 4),
        (bf16, None, bf16, 1),
        (bf16, bf16, fp8, 16),
        (torch.float32, bf16, fp8, 16),
    ):
        names = (str(dtype).removeprefix("torch.") for dtype in (source, destination))
        variants.append(
            KernelVariant(
                f"pack {' to '.join(names)}, {vector} at once",
                pack_triton.copy,
                {"table": "*i64", "owner": "*i32"},
                pack_triton.copy_constants(source, rounded, destination, vector),
                pack_triton.NUM_WARPS,
                has_fp8=destination is fp8,
            )
        )
    return variants


def _sampling_variants(chip: Chip) -> list[KernelVariant]:
    """A vocabulary of 151,936."""
    numbers = {"chunks": "i32", "vocab_size": "i32", "temperature": "fp32"}
    variants = []
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        reduced = {"logits": f"*{name}", "maxima": "*fp32", "sums": "*fp64"} | numbers
        sizes = {"WIDTH": 151936, "SCALED": True, "CHUNK": sampling_triton.CHUNK}
        variants.append(KernelVariant(f"sampling chunks {name}", sampling_triton.reduce_chunks, reduced, sizes))
        sizes = sizes | {"LOW": sampling_triton.LOW_BITS[dtype], "CHUNKS": 64}
        lists = {"bounds": "*i32", "quotas": "*i32", "kept_mass": "*fp64", "before": "*i32"}
        bounded = {"logits": f"*{name}", "maxima": "*fp32"} | lists | numbers | {"top_k": "i32"}
        for top_p in (0.95, 1.0):
            filters = {"TOP_K": True, "TOP_P": top_p, "WIDE": sampling_triton.WIDE}
            title = f"sampling top-k {name}" + " top-p" * (top_p < 1)
            variants.append(
                KernelVariant(
                    title,
                    sampling_triton.find_bounds,
                    bounded,
                    sizes | filters,
                    **sampling_triton.bound_options(chip),
                )
            )
        drawn = {"logits": f"*{name}", "uniform": "*fp64", "maxima": "*fp32", "sums": "*fp64"} | lists
        drawn |= {"token_ids": "*i64", "log_probs": "*fp32"} | numbers
        for filtered in (False, True):
            flags = {"GREEDY": False, "FILTERED": filtered}
            title = f"sampling draw {name}" + " filtered" * filtered
            variants.append(KernelVariant(title, sampling_triton.draw, drawn, sizes | flags, 8))
    pointers = dict.fromkeys(("keys", "positions", "sample_indices", "step"), "*i32") | {"numbers": "*fp64"}
    sizes = {"BLOCK": sampling_triton.NUMBERS}
    variants.append(KernelVariant("sampling philox", sampling_triton.draw_uniforms, pointers | {"n": "i32"}, sizes))
    return variants


def kernel_variants(chip: Chip) -> list[KernelVariant]:
    """As they run on `chip`. Each chip has the same ones, with other constants."""
    return [
        *_decode_attention_variants(chip),
        *_exact_product_variants(),
        *_exact_attention_variants(chip),
        *_rms_norm_variants(),
        *_swiglu_variants(),
        *_expert_gradients_variants(),
        *_rope_variants(),
        *_store_heads_variants(),
        *_checksum_variants(),
        *_fp8_matrix_variants(),
        *_linear_log_prob_variants(),
        *_pack_variants(),
        *_sampling_variants(chip),
    ]
