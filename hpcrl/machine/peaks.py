"""Peak rates of GPUs, which the utilisation of a run is measured against."""

from __future__ import annotations

# Dense bf16 operations per second of one device, from data sheets; the first matching name is used.
PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H20": 148e12,
    "L40S": 362e12,
}


def peak_of(device_name: str) -> float | None:
    """Return the bf16 operations per second of a device by torch's name; None if unknown."""
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in PEAKS.items() if name in words), None)
