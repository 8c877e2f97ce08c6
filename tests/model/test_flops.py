import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hpcrl.model.operations import tower_flops
from hpcrl.model.tower import build_tower, encode
from hpcrl.run.performance import peak_of
from tests.model.vision_models import VISION_MODELS, vision_shape


def test_peak_of_a_device_by_its_name():
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == peak_of("NVIDIA GH200 480GB") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA H20") == 148e12
    assert peak_of("AMD Instinct MI300X") is None


@pytest.mark.parametrize("name", VISION_MODELS)
def test_operations_of_a_tower(name):
    """Those that torch sees, which on the CPU are all but attention's: pairs of patches are counted by hand."""
    shape, grids = vision_shape(name, {}, {}), [(1, 6, 8), (2, 4, 4)]
    tower = build_tower(shape, torch.float32)
    patches = torch.zeros(48 + 32, shape.vision.patch_width)
    with FlopCounterMode(display=False) as counter:
        encode(tower, patches, torch.tensor(grids))
    frames, windows = 48**2 + 2 * 16**2, 2 * 16**2 + 2 * 8**2 + 2 * 16**2
    pairs = frames + windows if name == "qwen2.5-vl" else 3 * frames
    assert tower_flops(shape.vision, grids) == counter.get_total_flops() + 4 * 16 * pairs
