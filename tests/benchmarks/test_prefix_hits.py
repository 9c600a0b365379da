"""benchmarks.prefix_hits: with states in plenty nearly all is found that full attention finds."""

from __future__ import annotations

from benchmarks import prefix_hits


def test_states_in_plenty_find_what_full_attention_finds() -> None:
    result = prefix_hits.measure(8, [1, 64])
    few, plenty = (row["of_full"] for row in result["beside_states"])
    assert 0 < few < plenty
    assert 0.98 < plenty <= 1
