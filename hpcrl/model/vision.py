"""Vision-language models in numbers: the tower of config.json, its tensors and its operations. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hpcrl.runtime.exits import InputError

Size = tuple[int, ...]
Trained = Literal["none", "merger", "tower", "all"]
VISION_TOKENS = ("image", "video", "vision_start", "vision_end")  # whose ids config.json names <token>_token_id


@dataclass(frozen=True)
class Vision:
    """The tower of a vision-language model, and how its features join the tokens.

    config: the section `vision_config` of config.json, as JSON with sorted keys. mrope_section: frequencies of the
    rotary embedding that turn with time, height and width; interleaved: in turn, rather than one after the other.
    train: the part that is trained: the merger, which maps patches to tokens, the tower before it, both or nothing. lr:
    its peak learning rate; None: the language model's.
    """

    config: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    mrope_section: tuple[int, int, int]
    mrope_interleaved: bool
    train: Trained = field(default="none", compare=False)
    lr: float | None = field(default=None, compare=False)

    @cached_property
    def tower(self) -> Mapping[str, Any]:
        """`vision_config`."""
        return json.loads(self.config)

    @property
    def merge_size(self) -> int:
        """Patches of a token's side."""
        return int(self.tower["spatial_merge_size"])

    @property
    def patch_size(self) -> int:
        """Pixels of a patch's side."""
        return int(self.tower["patch_size"])

    @property
    def patch_width(self) -> int:
        """Numbers of a patch, of all its pixels, channels and frames."""
        return int(self.tower["in_channels"]) * int(self.tower["temporal_patch_size"]) * self.patch_size**2

    @property
    def num_deepstack(self) -> int:
        """Decoder layers after which features are added to the hidden states, from the first one on."""
        return len(self.tower.get("deepstack_visual_indexes", ()))

    @property
    def rope_axes(self) -> tuple[int, ...]:
        """The position that each frequency of the rotary embedding turns with: 0 time, 1 height, 2 width."""
        time, height, width = self.mrope_section
        if not self.mrope_interleaved:
            return (0,) * time + (1,) * height + (2,) * width
        axes = [0] * (time + height + width)
        for axis, num in ((1, height), (2, width)):
            axes[axis : 3 * num : 3] = [axis] * len(axes[axis : 3 * num : 3])
        return tuple(axes)

    @property
    def hidden_size(self) -> int:
        """Numbers of a token's embedding."""
        return int(self.tower["out_hidden_size"])

    @property
    def feature_width(self) -> int:
        """Numbers that the tower computes for a token, for its embedding and for the deepstack layers."""
        return self.hidden_size * (1 + self.num_deepstack)

    def is_trained(self, name: str) -> bool:
        """Whether the tower's tensor of this name is trained; the name has no prefix."""
        return self.train == "all" or self.train == ("merger" if self.is_merger(name) else "tower")

    @staticmethod
    def is_merger(name: str) -> bool:
        """Whether a tensor belongs to what maps patches to tokens."""
        return name.startswith(("merger.", "deepstack_merger_list."))

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Placeholder tokens of a picture."""
        time, height, width = grid
        return time * height * width // self.merge_size**2


def vision_from_hf(config: Mapping[str, Any], rope: Mapping[str, Any], rope_dim: int) -> Vision:
    """Return the tower described by config.json, where `rope` is the section of the rotary embedding of `rope_dim`
    numbers. Raises InputError for an unsupported one."""
    tower, is_qwen2_5 = config.get("vision_config"), config["model_type"] == "qwen2_5_vl"
    is_qwen3_5 = config["model_type"].startswith("qwen3_5")
    if not isinstance(tower, dict):
        raise InputError(f"vision_config={tower!r}; expected the description of the vision tower")
    config, tower, rope = (
        {key: value for key, value in section.items() if value is not None} for section in (config, tower, rope)
    )
    ids = {key: config.get(key, default) for key, default in (_IDS_3_5 if is_qwen3_5 else _IDS).items()}
    usual = [16, 24, 24] if is_qwen2_5 else [11, 11, 10] if is_qwen3_5 else [24, 20, 20]
    sections: Any = rope.get("mrope_section", usual)
    for key, token in ids.items():
        if not isinstance(token, int):
            raise InputError(f"{key}={token!r}; expected the id of a token")
    activation = "silu" if is_qwen2_5 else "gelu_pytorch_tanh"
    if (hidden_act := tower.get("hidden_act", activation)) != activation:
        raise InputError(f"vision_config.hidden_act={hidden_act}; only {activation} is supported; use another model")
    sound = (
        isinstance(sections, list) and len(sections) == 3 and all(isinstance(it, int) and it >= 0 for it in sections)
    )
    if not sound or 2 * sum(sections) != rope_dim:
        raise InputError(f"mrope_section={sections!r}; expected three numbers whose sum is {rope_dim // 2}")
    of_family = _QWEN2_5 if is_qwen2_5 else _QWEN3_5 if is_qwen3_5 else _QWEN3
    vision = Vision(
        json.dumps({**_DEFAULTS, **of_family, **tower}, sort_keys=True),
        **ids,
        mrope_section=tuple(sections),
        mrope_interleaved=not is_qwen2_5,
    )
    _check_tower(vision)
    return vision


MOST_LAYERS = 2000  # of a file, because they are built one by one

# As in transformers. Files leave out keys with these values, and Qwen's own in_channels.
_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_IDS_3_5 = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
_DEFAULTS = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2_5 = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "window_size": 112,
    "tokens_per_second": 4,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3 = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN3_5 = {key: value for key, value in _QWEN3.items() if key != "deepstack_visual_indexes"}
_SIZES = ("depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size")
_MERGED = ("spatial_merge_size", "temporal_patch_size", "out_hidden_size")


def _check_tower(vision: Vision) -> None:
    """Validate the numbers, because the file is untrusted."""
    for key in (*_SIZES, *_MERGED, *(["num_position_embeddings"] if vision.mrope_interleaved else ["window_size"])):
        found = vision.tower.get(key)
        if isinstance(found, bool) or not isinstance(found, int) or not 0 < found < 2**31:
            raise InputError(f"vision_config.{key}={found!r}; expected a positive whole number")
    if (depth := vision.tower["depth"]) > MOST_LAYERS:
        raise InputError(f"vision_config.depth={depth}; expected at most {MOST_LAYERS}")


def tower_tensors(vision: Vision) -> dict[str, Size]:
    """Return name and shape of each tensor of the tower, without the family's prefix."""
    return dict(_qwen3_tensors(vision.tower) if vision.mrope_interleaved else _qwen2_5_tensors(vision.tower))


def tower_flops(vision: Vision, grids: Iterable[Sequence[int]]) -> float:
    """Return the operations of the vision tower's pass over pictures, given their patches in time, height and width.

    2 per weight of a matrix and patch, of a merger and token, and 4 * hidden_size per pair of patches that attend to
    each other: those of a frame, or of a window of it.
    """
    tower, merged = vision.tower, vision.merge_size**2
    per_patch = 0.0
    for name, size in tower_tensors(vision).items():
        if len(size) > 1 and name != "pos_embed.weight":
            per_patch += 2.0 * math.prod(size) / (merged if vision.is_merger(name) else 1)
    num_full, window = int(tower["depth"]), 0
    if not vision.mrope_interleaved:
        num_full, window = len(tower["fullatt_block_indexes"]), int(tower["window_size"]) // vision.patch_size
    total = 0.0
    for time, height, width in grids:
        frame = height * width
        pairs = num_full * frame**2
        if window:
            squares = [side // window * window**2 + (side % window) ** 2 for side in (height, width)]
            pairs += (int(tower["depth"]) - num_full) * squares[0] * squares[1]
        total += time * (frame * per_patch + 4.0 * int(tower["hidden_size"]) * pairs)
    return total


def tower_training_factor(vision: Vision) -> float:
    """Return the operations of training as a multiple of `tower_flops`. If only the merger is trained, its own backward
    pass, a few percent, does not count."""
    return 3.0 if vision.train in ("tower", "all") else 1.0


def _linear(name: str, rows: int, cols: int) -> Iterator[tuple[str, Size]]:
    yield f"{name}.weight", (rows, cols)
    yield f"{name}.bias", (rows,)


def _patch_embed(tower: Mapping[str, Any]) -> tuple[str, Size]:
    side = tower["patch_size"]
    kernel = (tower["hidden_size"], tower["in_channels"], tower["temporal_patch_size"], side, side)
    return "patch_embed.proj.weight", kernel


def _blocks(
    tower: Mapping[str, Any], norms: Sequence[str], mlp: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, Size]]:
    """The tensors of the layers: their norms, attention and linear layers of the MLP."""
    hidden = tower["hidden_size"]
    for layer in range(tower["depth"]):
        block = f"blocks.{layer}."
        yield from ((f"{block}{name}", (hidden,)) for name in norms)
        yield from _linear(f"{block}attn.qkv", 3 * hidden, hidden)
        yield from _linear(f"{block}attn.proj", hidden, hidden)
        for name, size in mlp.items():
            yield from _linear(f"{block}mlp.{name}", *size)


def _qwen2_5_tensors(tower: Mapping[str, Any]) -> Iterator[tuple[str, Size]]:
    hidden, ffn = tower["hidden_size"], tower["intermediate_size"]
    merged = hidden * tower["spatial_merge_size"] ** 2
    yield _patch_embed(tower)
    mlp = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    yield from _blocks(tower, ("norm1.weight", "norm2.weight"), mlp)
    yield "merger.ln_q.weight", (hidden,)
    yield from _linear("merger.mlp.0", merged, merged)
    yield from _linear("merger.mlp.2", tower["out_hidden_size"], merged)


def _qwen3_tensors(tower: Mapping[str, Any]) -> Iterator[tuple[str, Size]]:
    hidden, ffn = tower["hidden_size"], tower["intermediate_size"]
    merged = hidden * tower["spatial_merge_size"] ** 2
    yield _patch_embed(tower)
    yield "patch_embed.proj.bias", (hidden,)
    yield "pos_embed.weight", (tower["num_position_embeddings"], hidden)
    norms = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
    yield from _blocks(tower, norms, {"linear_fc1": (ffn, hidden), "linear_fc2": (hidden, ffn)})
    further = [f"deepstack_merger_list.{number}" for number in range(len(tower.get("deepstack_visual_indexes", ())))]
    for merger in ("merger", *further):
        width = hidden if merger == "merger" else merged
        yield f"{merger}.norm.weight", (width,)
        yield f"{merger}.norm.bias", (width,)
        yield from _linear(f"{merger}.linear_fc1", merged, merged)
        yield from _linear(f"{merger}.linear_fc2", tower["out_hidden_size"], merged)
