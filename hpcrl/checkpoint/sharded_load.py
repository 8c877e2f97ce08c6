"""A model and its optimizer from disk, from megatron's distributed format, under any layout.

Without collectives, where megatron's entry point takes the whole world. `sharded_save` writes it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

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

from hpcrl.checkpoint.untrusted import check_archive, check_metadata, size_of_plain_file
from hpcrl.model.shape import is_adapter
from hpcrl.runtime import platform
from hpcrl.runtime.exits import InputError

if TYPE_CHECKING:
    from hpcrl.grid.groups import RoleGroups

HEADS = ("output_layer.weight", "value_head.weight", "reward_head.weight")


class Loadable(Protocol):
    """What can be loaded: `hpcrl.engine.engine.TrainEngine`."""

    def sharded_state_dict(self, *, optimizer: bool = True, is_loading: bool = False) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load_sharded(
    engine: Loadable,
    path: str | Path,
    groups: RoleGroups,
    *,
    optimizer: bool = True,
    strict: bool = True,
    adapters: bool = True,
) -> None:
    """Load what a `ShardedSave` wrote, under whatever layout. Each rank reads what it needs; no collective.

    `optimizer` False takes the weights alone. `strict` False keeps a head and adapters that the checkpoint lacks as
    they are: so an actor's weights start a critic. `adapters` False refuses those of the checkpoint: a model without
    them would be another one. Raises InputError when the folder is no checkpoint or does not fit the model.
    """
    path = Path(path)
    try:
        with platform.cpu_bridge(), torch.no_grad():
            state = engine.sharded_state_dict(optimizer=optimizer, is_loading=True)
            stored = _MetadataReader(path).read_metadata().state_dict_metadata
            wanted = [entry.key for entry in state["model"].values()]
            if any(map(is_adapter, stored)) and not (adapters and any(map(is_adapter, wanted))):
                raise InputError(
                    f"{path} has adapters (model.lora_rank), which this model does not take; merge them with "
                    "`hpcrl convert`, and name what that makes"
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
    except (Exception, CheckpointException) as error:  # torch derives its own from BaseException
        raise InputError(
            f"cannot load checkpoint {path}: {_cause(error)}; "
            "expected a folder that hpcrl has written for a model of this shape"
        ) from error
    if not optimizer:
        loaded.pop("optimizer", None)
    engine.load_state_dict(loaded)


def _cause(error: BaseException) -> str:
    """One line; torch wraps what went wrong on a rank with the traceback in its message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Megatron's `dist_checkpointing.load` without its collectives over the world, and without its unpickling."""
    if not check_is_distributed_checkpoint(path):
        raise ValueError(f"there is no {CONFIG_FNAME}")
    force_all_tensors_to_non_fp8(state)
    loaded = _same_on_all_ranks(path)
    sharded, others, factories = load_preprocess(state)
    merge(loaded, others)
    sharded, _ = extract_sharded_base(sharded)
    merge(loaded, _tensors(sharded, path))
    return apply_factory_merges(loaded, factories)


def _same_on_all_ranks(path: Path) -> dict[str, Any]:
    """Whatever the version of torch, no pickle is executed."""
    size = size_of_plain_file(path, COMMON_STATE_FNAME)
    with open(path / COMMON_STATE_FNAME, "rb") as file:
        check_archive(file, 0, size, COMMON_STATE_FNAME)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _tensors(sharded: dict[str, Any], path: Path) -> dict[str, Any]:
    """As megatron's `TorchDistLoadShardedStrategy`."""
    wanted = [entry for entry in nested_values(sharded) if isinstance(entry, ShardedTensor)]
    entries, flat, renamed = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded)
    tensors = torch_dist.mcore_to_pyt_state_dict(entries, is_loading=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp.load(
            tensors,
            storage_reader=_MetadataReader(path),
            planner=torch_dist.MCoreLoadPlanner(shapes_validation_sharded_tensors=wanted),
            no_dist=True,
        )
    state = {key: torch_dist._unwrap_pyt_sharded_tensor(value) for key, value in tensors.items()}
    state = torch_dist._replace_sharded_keys_with_state_dict_keys(state, flat, renamed)
    torch_dist._restore_dict_types(state, sharded)
    return state


class _MetadataReader(dcp.FileSystemReader):
    """Reads `.metadata`, which torch writes as a pickle, without executing what it may hold."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        folder = Path(self.path)
        size_of_plain_file(folder, ".metadata")
        metadata = _MetadataUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
        check_metadata(metadata, folder)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        check_archive(file, sinfo.offset, sinfo.length, f"{sinfo.relative_path} from byte {sinfo.offset} on")
        return super()._slice_file(file, sinfo)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that describe tensors, and nothing that acts."""

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
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint of hpcrl does")
