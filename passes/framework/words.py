"""Times and bytes in words, each in the unit that suits it."""


def milliseconds(seconds: float) -> str:
    """To a millisecond of long times, to a microsecond of short ones."""
    ms = 1e3 * seconds
    return f"{ms:.{0 if ms >= 1000 else 1 if ms >= 1 else 3}f} ms"


def bytes_text(count: int) -> str:
    """Three digits: 64 MiB, 1.5 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:{'.3g' if count < 999.5 * size else '.0f'}} {unit}"
    return f"{count:,} B"


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
