from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# The machines that run these tests are shared: a slow example is no finding.
settings.register_profile("hpcrl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hpcrl")

# Without a GPU kernels run in Triton's interpreter. Triton asks for it when it is imported, which megatron does.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
