"""Files of a Hugging Face directory: rows of tensors, tensors of files, and adapters in PEFT's format. No torch before
tensors are read: each rank reads the slices that it needs, and writes whole tensors.

The same spans serve reading, writing and the refit's planner: both formats have the same rows in another order.

Some families have the matrices of a layer's experts in one tensor x (experts, in, out), transposed against those of
linear layers. Here each expert's matrix (out, in) is a tensor of its own, `x[expert]`, and `x[expert].T` where no
library saves the tensor as (experts, out, in). `[0::2]` and `[1::2]` after it are every second of its rows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from hpcrl.model.blocks.block import Box
from hpcrl.model.families.config_json import CONFIG, FAMILIES, read_shape
from hpcrl.model.params import EMBEDDING, OUTPUT_LAYER, TOWER, Shard, shards
from hpcrl.model.shape import ModelShape
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import named, read_json

if TYPE_CHECKING:
    from torch import Tensor


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_BYTES = 5 * 10**9  # of a file, unless one tensor is larger; as in save_pretrained()
# Fields of a shape in which a directory's model may differ: its weights mean the same
NOT_WEIGHTS = ("max_position_embeddings", "windows", "init_std", "family", "tokenizer_size", "hf_keys")
# MXFP4 of the OCP Microscaling Formats 1.0, section 5.3.2: numbers of 4 bits with an exponent for each 32 of them.
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors of a weight
GROUP = 32  # numbers with one exponent
BIAS = 127  # of exponents
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same with the other sign


class Span(NamedTuple):
    """`rows` rows, from `row` on in Megatron's parameter and from `hf_row` on in the tensor `hf_name`; all columns."""

    row: int
    hf_name: str
    hf_row: int
    rows: int


def spans(shape: ModelShape, shard: Shard) -> list[Span]:
    """Return the spans of a parameter. Rows that pad the vocabulary are in none."""
    name = shard.name
    if name.startswith(TOWER):
        return [Span(0, f"{FAMILIES[shape.family].tower}{name.removeprefix(TOWER)}", 0, shard.global_shape[0])]
    hf_names = hf_names_of(shape, name)
    if len(hf_names) == 1:
        rows = shape.vocab_size if name in (EMBEDDING, OUTPUT_LAYER) else shard.global_shape[0]
        return [Span(0, hf_names[0], 0, rows)]
    periods, rows_of = shard.projection_rows(shard.global_shape[0])
    firsts, filled = list[int](), dict[str, int]()  # where each projection begins; a tensor may have several
    for hf_name, rows in zip(hf_names, rows_of.values(), strict=True):
        firsts.append(filled.get(hf_name, 0))
        filled[hf_name] = firsts[-1] + periods * rows
    cuts, row = [], 0
    for period in range(periods):
        for hf_name, first, rows in zip(hf_names, firsts, rows_of.values(), strict=True):
            cuts.append(Span(row, hf_name, first + period * rows, rows))
            row += rows
    return cuts


def hf_names_of(shape: ModelShape, name: str) -> list[str]:
    """Return the names of the tensors whose rows a parameter of this global name has."""
    layer, expert = re.search(r"layers\.(\d+)\.", name), re.search(r"local_experts\.(\d+)\.", name)
    pattern = re.sub(r"local_experts\.\d+\.", "local_experts.#.", re.sub(r"layers\.\d+\.", "layers.*.", name))
    hf_names = list(FAMILIES[shape.family].names[pattern])
    for sign, number in (("*", layer), ("#", expert)):
        hf_names = [hf_name.replace(sign, number[1]) if number else hf_name for hf_name in hf_names]
    return hf_names


class StackPlace(NamedTuple):
    """What x[3].T[1::2] means: the matrix `number` of the tensor `name` of a file, in it every `step`-th row from
    `first` on. number: None for a tensor that is not a stack."""

    name: str
    number: int | None = None
    is_transposed: bool = False
    first: int = 0
    step: int = 1


_STACKED = re.compile(r"(.+?)\[(\d+)\](\.T)?(?:\[(\d)::(\d)\])?")


def stack_of(hf_name: str) -> StackPlace:
    if (found := _STACKED.fullmatch(hf_name)) is None:
        return StackPlace(hf_name)
    name, number, transposed, first, step = found.groups()
    return StackPlace(name, int(number), transposed is not None, int(first or 0), int(step or 1))


_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def stacked_twin(hf_name: str) -> tuple[str, int, bool] | None:
    """Return where the matrix of an expert is in files that have those of a layer in two tensors (experts, out, in),
    gate and up in one: the tensor, the expert, and whether it is the second half of the rows. None for other names."""
    if (found := _OF_EXPERT.fullmatch(hf_name)) is None:
        return None
    parent, number, kind = found.groups()
    return f"{parent}.{'down_proj' if kind == 'down' else 'gate_up_proj'}", int(number), kind == "up"


def hf_shards(shape: ModelShape) -> list[Shard]:
    """Return Hugging Face's tensors, in the order of the model: `local_name` and the boxes' places are Hugging Face's,
    `name` is Megatron's."""
    found: dict[str, list[tuple[Shard, Span]]] = {}
    for shard in shards(shape):
        for span in spans(shape, shard):
            found.setdefault(span.hf_name, []).append((shard, span))
    return [_hf_shard(hf_name, parts) for hf_name, parts in found.items()]


def _hf_shard(hf_name: str, parts: list[tuple[Shard, Span]]) -> Shard:
    shard = parts[0][0]
    cols = shard.global_shape[1:]
    boxes = tuple(Box((span.row, span.row + span.rows), (0, math.prod(cols)), span.hf_row, 0) for _, span in parts)
    rows = sum(span.rows for _, span in parts)
    return Shard(shard.name, hf_name, shard.global_shape, (rows, *cols), boxes, tp_replicated=True)


def slices(shape: ModelShape, shard: Shard) -> Iterator[tuple[str, Box]]:
    """Yield the slices of Hugging Face's tensors that make up a rank's part of a parameter: the name of a tensor, and a
    box with its rows and columns. A vector has the columns (0, 1)."""
    for span, box in ((span, box) for span in spans(shape, shard) for box in shard.boxes):
        part, shift = box.within((span.row, span.row + span.rows), box.global_cols), span.hf_row - span.row
        if part is not None:
            top, bottom = part.global_rows
            yield span.hf_name, part._replace(global_rows=(top + shift, bottom + shift))


def others_of(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Return the tensors of files that are not the model's, but known: those of the family, and layers that predict
    further tokens, which follow the model's own."""
    pattern, own = FAMILIES[shape.family].others, {stack_of(shard.local_name).name for shard in hf_shards(shape)}
    rest = [name for name in names if name not in own]
    # Only further layers have this projection.
    further = tuple(name.removesuffix("eh_proj.weight") for name in rest if name.endswith(".eh_proj.weight"))
    return [name for name in rest if name.startswith(further) or (pattern is not None and re.search(pattern, name))]


def differing(shape: ModelShape, shapes: dict[str, tuple[int, ...]]) -> Iterable[str]:
    """Yield a line for each tensor that is missing, of another shape, or unknown."""
    expected, also = {}, {}
    for shard in hf_shards(shape):
        name, number, is_transposed, _, step = stack_of(shard.local_name)
        expected[name] = size = step * shard.local_shape[0], *shard.local_shape[1:]
        if number is not None and shape.routed is not None:
            expected[name] = shape.routed.num_experts, *reversed(size)
            if not is_transposed:
                also[name] = shape.routed.num_experts, *size  # as transformers 5 saves them
    for name, size in expected.items():
        if name not in shapes:
            yield f"no tensor {name}"
        elif shapes[name] not in (size, also.get(name)):
            yield f"{name} has shape {shapes[name]}; config.json says {size}"
    # extra tensors of older libraries: a tied head, and the frequencies of the rotary embedding
    known = {*others_of(shape, shapes), *(["lm_head.weight"] if shape.tie_word_embeddings else [])}
    for name in shapes.keys() - expected.keys() - known:
        if not name.endswith("rotary_emb.inv_freq"):
            yield f"{name} is in the files but not in the model"


def unstacked(shape: ModelShape, found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the sizes of tensors with those of `stacked_twin` under the experts' names, for a family that has these
    names."""
    left = dict(found)
    for shard in hf_shards(shape):
        twin = stacked_twin(shard.local_name)
        if twin is not None and shard.local_name not in found and len(found.get(twin[0], ())) == 3:
            left.pop(twin[0], None)
            _, rows, columns = found[twin[0]]
            left[shard.local_name] = rows // (2 if "gate_up" in twin[0] else 1), columns
    return left


def open_weights(folder: Path, shape: ModelShape) -> Safetensors:
    """Open a directory with a model of this `shape`. Raises InputError for a model that computes something else."""
    in_folder = read_shape(folder)
    for field in fields(ModelShape):
        value, expected = getattr(in_folder, field.name), getattr(shape, field.name)
        if field.name not in NOT_WEIGHTS and value != expected:
            raise InputError(f"{folder / CONFIG} describes another model: {field.name} is {value}, expected {expected}")
    shape.check_windows(in_folder, str(folder / CONFIG))
    source = Safetensors(folder)
    source.check(shape)
    return source


class Safetensors:
    """The tensors of a directory's memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        try:
            if (folder / INDEX).exists():
                found = read_json(folder / INDEX, folder)["weight_map"]
                self._file_of = {str(name): str(file) for name, file in found.items()}
            else:
                self._file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise InputError(f"{folder}: {error}; expected {SINGLE} or {INDEX} beside {CONFIG}") from error

    def check(self, shape: ModelShape) -> None:
        """Raise InputError if the files do not fit this model, from their headers: no tensor is read."""
        names = {weight_of(name, self._file_of) for name in self._file_of}
        found = {name: tuple(self._slice(name).get_shape()) for name in sorted(names)}
        problems = list(differing(shape, unstacked(shape, found)))
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise InputError(f"{self._folder}: {problems[0]}{more}; copy the directory again, or fix {CONFIG}")

    def load(self, shape: ModelShape, shards: list[Shard], weights: Mapping[str, Tensor]) -> None:
        """Read a rank's parts of Megatron parameters into `weights`, by global names; padding rows become 0."""
        for shard in shards:
            out = weights[shard.name].detach().view(shard.local_shape[0], -1)
            out.zero_()
            for hf_name, box in slices(shape, shard):
                values = self._read(*self._place(hf_name, box), shard)
                height, width = values.shape
                out[box.local_row : box.local_row + height, box.local_col : box.local_col + width].copy_(values)

    def _place(self, hf_name: str, box: Box) -> tuple[StackPlace, Box]:
        """Return where a box of a tensor is in the files."""
        twin = stacked_twin(hf_name)
        if hf_name in self._file_of or twin is None or twin[0] not in self._file_of:
            return stack_of(hf_name), box
        stack, number, is_up = twin
        shift = self._slice(stack).get_shape()[1] // 2 if is_up else 0
        top, bottom = box.global_rows
        return StackPlace(stack, number), box._replace(global_rows=(top + shift, bottom + shift))

    def _read(self, place: StackPlace, box: Box, shard: Shard) -> Tensor:
        """Return the values of a box, (rows, columns)."""
        name, number, is_transposed, first, step = place
        source = self._slice(name)
        rows, cols = slice(step * box.global_rows[0], step * box.global_rows[1]), slice(*box.global_cols)
        with self._named(name):
            if isinstance(source, Mxfp4Slice) and number is not None:
                return source[number, cols, slice(rows.start + first, rows.stop, step)].T
            size, height = tuple(source.get_shape()), rows.stop - rows.start
            if number is None:
                values = source[rows, cols] if len(size) == 2 else source[rows].reshape(height, -1)[:, cols]
            elif len(size) == 2:
                values = source[number, rows].unsqueeze(1)
            elif not is_transposed and size[1:] == shard.global_shape:
                values = source[number, rows, cols]
            else:
                values = source[number, cols, rows].T
        return values[first::step]

    def others(self, shape: ModelShape) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of `others_of` by name, at most `MAX_BYTES` at a time, unless one is larger."""
        part: dict[str, Tensor] = {}
        size = 0
        for name in others_of(shape, self._file_of):
            with self._named(name):
                tensor = self._file(self._file_of[name]).get_tensor(name)
            if part and size + tensor.nbytes > MAX_BYTES:
                yield part
                part, size = {}, 0
            part[name] = tensor
            size += tensor.nbytes
        if part:
            yield part

    def _slice(self, name: str) -> Any:
        if name not in self._file_of and name + BLOCKS in self._file_of:
            return Mxfp4Slice(f"{self._folder}: {name}", self._slice(name + BLOCKS), self._slice(name + SCALES))
        if name not in self._file_of:
            raise InputError(f"{self._folder}: no tensor {name}; copy the directory again")
        with self._named(name):
            return self._file(self._file_of[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self._folder / name
            if Path(name).name != name or not path.exists():  # the index is untrusted
                raise FileNotFoundError(f"no file {name} in {self._folder}")
            with named(path, self._folder) as opened:
                self._open[name] = safe_open(opened, "pt")
        return self._open[name]

    @contextmanager
    def _named(self, tensor: str) -> Iterator[None]:
        """Context that converts errors into an InputError with the name of the file."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            file = self._file_of.get(tensor) or self._file_of[tensor + BLOCKS]
            path, reason = self._folder / file, " ".join(str(error).split())
            raise InputError(f"{path}: {reason}; expected {tensor} in it: copy the directory again") from error


def whole_tensors(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file by name, from those of its `hf_shards`: matrices of a stacked tensor become one."""
    import torch

    tensors: dict[str, Tensor] = {}
    counts = Counter(stack_of(name).name for name in parts)
    for hf_name, part in parts.items():
        name, number, _, first, step = stack_of(hf_name)
        if number is None:
            tensors[name] = part
            continue
        if name not in tensors:
            size = step * len(part), *part.shape[1:]
            tensors[name] = torch.empty(counts[name] // step, *reversed(size), dtype=part.dtype)
        matrix = tensors[name][number]
        (matrix.T if matrix.dim() == 2 else matrix)[first::step] = part
    return tensors


def weight_of(name: str, names: Container[str]) -> str:
    """Return the weight that the tensor `name` of a file is a part of; its own name if it is whole."""
    weight = name.removesuffix(BLOCKS).removesuffix(SCALES)
    return weight if weight + BLOCKS in names and weight + SCALES in names else name


class Mxfp4Slice:
    """A weight (experts, in, out) of two tensors in uint8, which is read like a slice of a safetensors file.

    Args:
        blocks: (experts, out, in / 32, 16), each byte with two numbers, of which the first has the lower bits.
        scales: (experts, out, in / 32).
    """

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales
        sizes, dtypes = (blocks.get_shape(), scales.get_shape()), {blocks.get_dtype(), scales.get_dtype()}
        if dtypes != {"U8"} or len(sizes[0]) != 4 or sizes[0][3] != GROUP // 2 or sizes[0][:3] != sizes[1]:
            raise InputError(
                f"{name}: blocks of {sizes[0]} and scales of {sizes[1]} in {' and '.join(sorted(dtypes))}; expected "
                f"U8 (experts, rows, groups, {GROUP // 2}) and (experts, rows, groups): copy the directory again"
            )

    def get_shape(self) -> list[int]:
        experts, rows, groups, _ = self._blocks.get_shape()
        return [experts, groups * GROUP, rows]

    def __getitem__(self, place: tuple[int, slice, slice]) -> Tensor:
        """Return a part of one expert's matrix, fp32; only the groups that it needs are read. The second slice may have
        a step, which slices of files do not have."""
        import torch

        number, inner, outer = place
        first, last = inner.start // GROUP, -(-inner.stop // GROUP)
        read = number, slice(outer.start, outer.stop), slice(first, last)
        blocks, scales = (part[read][:: outer.step or 1] for part in (self._blocks, self._scales))
        numbers = torch.tensor((*POSITIVE, *(-number for number in POSITIVE)))
        of_bytes = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), -1)
        values = torch.nn.functional.embedding(blocks.int(), of_bytes)  # (rows, groups, 16, 2)
        factors = torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS)
        values = values.mul_(factors[..., None, None]).flatten(1)
        return values[:, inner.start - first * GROUP : inner.stop - first * GROUP].T
