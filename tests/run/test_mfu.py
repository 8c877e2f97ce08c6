import pytest

from hpcrl.config.derive import check
from hpcrl.config.schema import Config
from hpcrl.model.shape import ModelShape
from hpcrl.model.sizes import forward_flops
from hpcrl.run.performance import mfu_metrics

SHAPE = ModelShape(2, 64, 96, 4, 2, 16, 500)


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
