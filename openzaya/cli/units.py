"""Large numbers for people."""

from __future__ import annotations

from collections.abc import Sequence


def count(value: float) -> str:
    """1,290,741,584 -> 1.291 B."""
    return _scaled(value, 1000, ("", "K", "M", "B", "T"))


def flops(value: float) -> str:
    """As `count`, in FLOPs."""
    return _scaled(value, 1000, ("", "K", "M", "G", "T", "P")) + "FLOP"


def decimal(value: float) -> str:
    """Bytes in decimal units, as disks are sold: 17.7 GB."""
    return _scaled(value, 1000, ("", "K", "M", "G", "T", "P")) + "B"


def binary(value: float) -> str:
    """Bytes in binary units, as memory is sold."""
    return _scaled(value, 1024, ("", "Ki", "Mi", "Gi", "Ti", "Pi")) + "B"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while value >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = 0 if not power else 3 if value < 10 else 2 if value < 100 else 1
    return f"{value:.{digits}f} {units[power]}"
