import json
from dataclasses import replace

import pytest

from hpcrl.config.derive import check
from hpcrl.config.schema import Config
from hpcrl.model.params import has_fp8_products
from hpcrl.model.shape import ModelShape, forward_flops
from hpcrl.model.vision import Vision
from hpcrl.run.performance import mfu_metrics, peak_of

SHAPE = ModelShape(2, 64, 96, 4, 2, 16, 500)


def test_peak_of_a_device_by_its_name():
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == peak_of("NVIDIA GH200 480GB") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA H20") == 148e12
    assert peak_of("AMD Instinct MI300X") == 1307e12 and peak_of("AMD Instinct MI100") is None
    assert peak_of("NVIDIA H200", fp8=True) == 1979e12
    assert peak_of("NVIDIA A100-SXM4-80GB", fp8=True) is None


def test_the_peak_is_of_fp8_only_if_a_weight_has_8_bit_products():
    large = ModelShape(2, 4096, 7168, 32, 8, 128, 512)
    assert has_fp8_products(large, "e4m3", tp=4)
    assert not has_fp8_products(large, "e4m3", tp=8)  # fc1, the largest, has 7.3 M elements on a rank
    assert not has_fp8_products(large, None, tp=1)


def test_a_device_at_its_peak_has_an_mfu_of_1():
    """Two passes over the samples to train on them, on half of the four ranks."""
    config = Config.model_validate(
        {
            "data": {"train_files": ["none"]},
            "placement": {"pools": {"all": "*", "half": "0-1"}, "actor": {"pool": "half"}},
            "actor": {"ppo_epochs": 2},
            "critic": {"ppo_epochs": 1},
            "algorithm": {"adv_estimator": "gae"},
        }
    )
    forward = forward_flops(SHAPE, [30, 50], 20)
    seconds = {"timing_s/old_log_prob": 1.0, "timing_s/update_actor": 6.0, "timing_s/gen": 9.0}
    found = mfu_metrics(config, check(config, 4), SHAPE, [30, 50], 20, seconds, peak=forward / 2)
    assert found == {"perf/mfu/actor_infer": pytest.approx(1.0), "perf/mfu/actor": pytest.approx(1.0)}


@pytest.mark.parametrize(("train", "update"), [("all", 2.0), ("merger", 4.0 / 3.0)])
def test_a_tower_counts_where_it_runs(train, update):
    """As much work as the language model has: all of it is trained, or the tower has no backward pass."""
    config = Config.model_validate(
        {"data": {"train_files": ["none"]}, "algorithm": {"adv_estimator": "reinforce_plus_plus"}}
    )
    tower = {"depth": 1, "patch_size": 2, "in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "out_hidden_size": 64}
    vision = Vision(json.dumps(tower | sizes), 0, 0, 0, 0, (1, 1, 1), mrope_interleaved=False, train=train)
    forward = forward_flops(SHAPE, [30, 50], 20)
    asked = (config, check(config, 1), replace(SHAPE, vision=vision), [30, 50], 20)
    seconds = {"timing_s/old_log_prob": 1.0, "timing_s/update_actor": 3.0}
    found = mfu_metrics(*asked, seconds, forward, tower=forward)
    assert found == {"perf/mfu/actor_infer": pytest.approx(2.0), "perf/mfu/actor": pytest.approx(update)}
