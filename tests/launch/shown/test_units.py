"""Units: one for a table, with digits that suit its largest number."""

import pytest

from dhelix.launch.shown.units import time_unit


@pytest.mark.parametrize(
    ("largest", "small", "shown"),
    [
        (12345.6, 0.84, ["12,345.6 ms", "0.8 ms"]),
        (123.45, 0.84, ["123.5 ms", "0.8 ms"]),
        (12.345, 0.84, ["12.35 ms", "0.84 ms"]),
        (1.2346, 0.0846, ["1.235 ms", "0.085 ms"]),
        (0.8, 0.0345, ["800.0 µs", "34.5 µs"]),
        (0.0, -0.0, ["0.0 µs", "0.0 µs"]),
    ],
)
def test_digits_suit_the_largest_time(largest: float, small: float, shown: list[str]) -> None:
    unit = time_unit([None, small, largest])
    assert [unit.text(largest), unit.text(small)] == shown
