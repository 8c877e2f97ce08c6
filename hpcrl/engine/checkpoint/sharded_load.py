"""Loading of a model and its optimizer from megatron's distributed format, under any layout; `sharded_save` writes it.

No collectives, unlike megatron's entry point, which involves the whole world. Checkpoints are untrusted: they must not
name files outside their folder, contain objects in place of tensors, or unpack to more than their size.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import stat
import warnings
import zipfile
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpcrl.model.shape import is_adapter
from hpcrl.runtime import platform
from hpcrl.runtime.exits import InputError
from hpcrl.sandbox.foreign_files import open_file, read_bytes

if TYPE_CHECKING:
    from hpcrl.engine.engine import TrainEngine


def check_metadata(metadata: Any, folder: Path) -> None:
    """Check that there are only tensors, in parts of regular files directly in `folder`. Raises ValueError."""
    if type(metadata) is not Metadata:
        raise ValueError(f".metadata holds a {type(metadata).__name__}; expected Metadata")
    for name, entry in metadata.state_dict_metadata.items():
        # Torch would unpickle anything else than a tensor.
        if type(entry) is not TensorStorageMetadata:
            raise ValueError(f".metadata has a {type(entry).__name__} for {name!r}; expected a tensor")
    sizes: dict[str, int] = {}
    for index, part in metadata.storage_data.items():
        name = part.relative_path
        if name not in sizes:
            sizes[name] = size_of_plain_file(folder, name)
        if not 0 <= part.offset <= part.offset + part.length <= sizes[name]:
            raise ValueError(f"{name} has {sizes[name]} bytes; .metadata places {index.fqn} after them")
        if getattr(part, "transform_descriptors", None):
            raise ValueError(f"{name}: {index.fqn} has transforms {part.transform_descriptors}; expected none")


def size_of_plain_file(folder: Path, name: object) -> int:
    """Return the size of a regular file directly in `folder`. Raises ValueError for links, pipes and other paths."""
    if not isinstance(name, str) or PurePath(name).name != name:
        raise ValueError(f".metadata names the file {name!r}; expected one in {folder}")
    found = os.lstat(folder / name)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{name} is not a regular file; checkpoints contain no links")
    return found.st_size


def check_archive(file: IO[bytes], start: int, size: int, what: str) -> None:
    """Check that the `size` bytes of `file` from `start` on are a zip archive as written by torch.save: uncompressed,
    with records no larger than the archive. Raises ValueError."""
    try:
        with zipfile.ZipFile(io.BufferedReader(Window(file, start, size))) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise ValueError(f"{what}: {error}; expected a file of torch.save") from None
    unpacked = sum(record.file_size for record in records)
    if unpacked > size or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(f"{what} has {size} bytes, but its records unpack to {unpacked}; expected no compression")


class Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        if self._at < 0:
            raise OSError(errno.EINVAL, "seek before the beginning")
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


MOST_METADATA = 1 << 32  # bytes
HEADS = ("output_layer.weight", "value_head.weight", "reward_head.weight")


def load_sharded(
    engine: TrainEngine, path: str | Path, *, optimizer: bool = True, strict: bool = True, adapters: bool = True
) -> None:
    """Load the state written by `ShardedSave`, under any layout. Each rank reads what it needs; no collectives.

    `optimizer` False loads the weights only. `strict` False keeps the values of a head and of adapters that the
    checkpoint lacks, to start a critic from an actor's weights. `adapters` False raises for a checkpoint with adapters,
    because the model without them would differ. Raises InputError if the folder is not a checkpoint or does not fit the
    model.
    """
    path = Path(path)
    try:
        with platform.cpu_bridge(), torch.no_grad():
            state = engine.sharded_state_dict(optimizer=optimizer, is_loading=True)
            stored = _MetadataReader(path).read_metadata().state_dict_metadata
            requested = [entry.key for entry in state["model"].values()]
            if any(map(is_adapter, stored)) and not (adapters and any(map(is_adapter, requested))):
                raise InputError(
                    f"{path} has adapters (model.lora_rank), but this model has none; merge them with "
                    "`hpcrl convert`, and use the result"
                )
            if not strict:
                state["model"] = {
                    name: entry
                    for name, entry in state["model"].items()
                    if entry.key in stored or not (entry.key in HEADS or is_adapter(entry.key))
                }
            loaded = _load(state, path)
    except InputError:
        raise
    except (Exception, CheckpointException) as error:  # torch's exception derives from BaseException
        raise InputError(
            f"cannot load checkpoint {path}: {_cause(error)}; expected a checkpoint of a model of this shape"
        ) from error
    if not optimizer:
        loaded.pop("optimizer", None)
    engine.load_state_dict(loaded)


def _cause(error: BaseException) -> str:
    """Return one line; torch's exception has the whole traceback in its message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Megatron's `dist_checkpointing.load` without collectives over the world and without unpickling."""
    if not check_is_distributed_checkpoint(path):
        raise ValueError(f"no {CONFIG_FNAME}")
    force_all_tensors_to_non_fp8(state)
    loaded = _same_on_all_ranks(path)
    sharded, others, factories = load_preprocess(state)
    merge(loaded, others)
    sharded, _ = extract_sharded_base(sharded)
    merge(loaded, _tensors(sharded, path))
    return apply_factory_merges(loaded, factories)


def _same_on_all_ranks(path: Path) -> dict[str, Any]:
    """Read the state that is the same on all ranks; no pickle is executed, for any version of torch."""
    size = size_of_plain_file(path, COMMON_STATE_FNAME)
    with open_file(path / COMMON_STATE_FNAME, links=False) as file:
        check_archive(file, 0, size, COMMON_STATE_FNAME)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _tensors(sharded: dict[str, Any], path: Path) -> dict[str, Any]:
    """Same as megatron's `TorchDistLoadShardedStrategy`."""
    requested = [entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)]
    entries, flat, renamed = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded)
    tensors = torch_dist.mcore_to_pyt_state_dict(entries, is_loading=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp.load(
            tensors,
            storage_reader=_MetadataReader(path),
            planner=torch_dist.MCoreLoadPlanner(shapes_validation_sharded_tensors=requested),
            no_dist=True,
        )
    state = {key: torch_dist._unwrap_pyt_sharded_tensor(value) for key, value in tensors.items()}
    state = torch_dist._replace_sharded_keys_with_state_dict_keys(state, flat, renamed)
    torch_dist._restore_dict_types(state, sharded)
    return state


class _MetadataReader(dcp.FileSystemReader):
    """Reads `.metadata`, which torch writes as a pickle, without executing its content."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        folder = Path(self.path)
        size_of_plain_file(folder, ".metadata")
        metadata = _MetadataUnpickler(
            io.BytesIO(read_bytes(folder / ".metadata", most=MOST_METADATA, links=False))
        ).load()
        check_metadata(metadata, folder)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        check_archive(file, sinfo.offset, sinfo.length, f"{sinfo.relative_path} from byte {sinfo.offset} on")
        return super()._slice_file(file, sinfo)


class _MetadataUnpickler(pickle.Unpickler):
    """Allows the classes that describe tensors, and no others."""

    ALLOWED = {
        "pathlib": ("Path", "PosixPath", "PurePosixPath"),
        "torch": (
            "Size",
            "float32",
            "float64",
            "bfloat16",
            "float16",
            "int64",
            "int32",
            "int16",
            "int8",
            "uint8",
            "bool",
        ),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        ),
    }

    def find_class(self, module: str, name: str) -> Any:
        # Python 3.13 moved pathlib's classes into pathlib._local.
        if name in self.ALLOWED.get(module.removesuffix("._local"), ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which hpcrl never writes")
