"""Tensors in a mapped file are what torch.save would have written."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from hpcrl.engine.checkpoint.sharded_load import check_archive
from hpcrl.engine.checkpoint.snapshot import TensorFile


def test_torch_reads_what_was_copied_into_a_file(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    shapes = ((3, 5), (), (1025,), (0, 4))
    like = [torch.empty(shape, dtype=dtype) for dtype in dtypes for shape in shapes]
    file, path = TensorFile(tmp_path / "actor" / "__0_0.distcp", like), tmp_path / "actor" / "__0_0.distcp"
    assert file.fits(like) and not file.fits(like[1:])
    for value in (1, 0, 3):
        tensors = [torch.full_like(tensor, value) for tensor in like]
        for view, tensor in zip(file.tensors, tensors, strict=True):
            view.copy_(tensor)
        content = path.read_bytes()
        for (start, length), tensor in zip(file.pieces, tensors, strict=True):
            check_archive(io.BytesIO(content), start, length, "piece")
            read = torch.load(io.BytesIO(content[start : start + length]), weights_only=True)
            assert read.dtype == tensor.dtype and torch.equal(read, tensor)


def test_a_file_of_no_tensors(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "file", [])
    assert (file.pieces, file.tensors, len(file.map)) == ([], [], 0)
