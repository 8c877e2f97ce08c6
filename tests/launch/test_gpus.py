"""Which GPU a rank has, and what a job on GPUs sets before torch starts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hpcrl.config.schema import Config
from hpcrl.launch.exits import InputError
from hpcrl.launch.world import check_own_gpus, prepare_environment


def test_two_ranks_on_one_gpu_are_an_error() -> None:
    check_own_gpus(["a", "b", "c"])
    with pytest.raises(InputError, match="ranks 1 and 3 have the same GPU .b., .* HPCRL_SHARE_GPU=1"):
        check_own_gpus(["a", "b", "c", "b"])


def test_a_timeout_of_nothing_is_refused() -> None:
    assert Config.model_validate({}).run.nccl_timeout == 1800
    with pytest.raises(ValidationError, match="greater than 0"):
        Config.model_validate({"run": {"nccl_timeout": 0}})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_of_memory_grow_unless_the_user_says_how(name: str) -> None:
    theirs = {name: "max_split_size_mb:64"}
    prepare_environment(theirs)
    assert {key: value for key, value in theirs.items() if "ALLOC" in key} == {name: "max_split_size_mb:64"}
    default: dict[str, str] = {}
    prepare_environment(default)
    assert default["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
