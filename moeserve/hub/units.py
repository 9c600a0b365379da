"""Sizes, rates and times as text, and texts of others in one line."""

_MAX_CHARACTERS = 300  # of a text of others


def size_text(num_bytes: float) -> str:
    """Return a size in the binary unit that suits it."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes:.0f} bytes"


def duration_text(seconds: float) -> str:
    """Return a time in hours, minutes or seconds."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
    if seconds >= 60:
        return f"{seconds // 60:.0f} min"
    return f"{seconds:.0f} s"


def one_line(text: str) -> str:
    """Return a text that a server sent, without control characters and line ends, shortened."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(printable.split())[:_MAX_CHARACTERS]
