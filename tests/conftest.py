from __future__ import annotations

from hypothesis import HealthCheck, settings

# The machines that run these tests are shared: a slow example is no finding.
settings.register_profile("hpcrl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hpcrl")
