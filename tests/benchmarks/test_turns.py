"""Two checkouts in turns: who is first alternates, and ratios are of neighbours."""

from __future__ import annotations

from benchmarks.turns import in_turns


def test_ratios_are_of_neighbours_and_the_warm_up_does_not_count() -> None:
    """The machine slows down tenfold in the second round, so each side's median means nothing."""
    asked = []

    def measure(name: str, number: int) -> dict[str, float]:
        asked.append((name, number))
        speed = {-1: 1000.0, 0: 10.0, 1: 1.0, 2: 10.0}[number]
        return {"x": speed * (1.5 if name == "after" else 1.0)}

    compared = in_turns(measure, 3, warm_up=True)
    orders = (("before", "after"), ("after", "before"))
    assert asked == [(name, number) for number in (-1, 0, 1, 2) for name in orders[number % 2]]
    assert compared["after_over_before"] == {"x": 1.5}
    assert [sample["x"] for sample in compared["samples"]["before"]] == [10.0, 1.0, 10.0]
