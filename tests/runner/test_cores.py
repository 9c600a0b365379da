"""The CPUs that ranks compute on, of made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.runner.cores import assign_cpus, cpu_list, fast_cpus, format_cpus, nodes, num_cores


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize("text", ["", "3", "0-2,5", "0-7,16-23"])
def test_lists_are_as_the_kernel_writes_them(text: str) -> None:
    assert format_cpus(cpu_list(text)) == text


def test_the_fast_cores_of_hybrid_processors_are_taken(tmp_path: Path) -> None:
    """Intel's two kinds; capacities of ARM; clocks, among which those of favoured cores are of one
    kind.
    """
    intel = machine(tmp_path / "intel", {"cpu_core/cpus": "0-7", "cpu_atom/cpus": "8-15"})
    assert fast_cpus(set(range(16)), intel) == set(range(8))
    assert fast_cpus({8, 9}, intel) == {8, 9}  # the mask leaves no other
    capacity = {
        f"system/cpu/cpu{cpu}/cpu_capacity": str(size)
        for cpu, size in enumerate((260, 260, 871, 1024))
    }
    assert fast_cpus({0, 1, 2, 3}, machine(tmp_path / "arm", capacity)) == {2, 3}
    clocks = {
        f"system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq": clock
        for cpu, clock in enumerate(("5500000", "5300000", "3300000"))
    }
    assert fast_cpus({0, 1, 2}, machine(tmp_path / "amd", clocks)) == {0, 1}
    assert fast_cpus({0, 1, 2}, tmp_path / "nothing") == {0, 1, 2}


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    topology = {
        f"system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}"
        for cpu in range(4)
    }
    assert num_cores(range(4), machine(tmp_path, topology)) == 2
    assert num_cores(range(4), tmp_path / "nothing") == 4


def test_ranks_stay_in_a_node_each(tmp_path: Path) -> None:
    """Two nodes, the second one with more CPUs in the mask; ten would sort before two as text."""
    system = machine(
        tmp_path, {"system/node/node2/cpulist": "0-7", "system/node/node10/cpulist": "8-15"}
    )
    some = set(range(4, 16))
    first = {4, 5, 6, 7}
    second = set(range(8, 16))
    assert nodes(some, system) == [first, second]
    assert assign_cpus(some, 0, 1, system=system) == (second, 1)
    assert [assign_cpus(some, rank, 4, system=system) for rank in range(4)] == [(first, 2)] * 2 + [
        (second, 2)
    ] * 2
    assert [assign_cpus(some, rank, 3, system=system) for rank in range(3)] == [(first, 2)] * 2 + [
        (second, 1)
    ]
    assert assign_cpus(some, 0, 1, 8, system) == (second, 1)
    assert assign_cpus(some, 0, 1, 9, system) == (some, 1)  # asked for more than a node has
    assert assign_cpus(some, 0, 1, system=tmp_path / "nothing") == (some, 1)


def test_asking_for_more_threads_than_fast_cores_takes_all(tmp_path: Path) -> None:
    hybrid = machine(tmp_path, {"cpu_core/cpus": "0-3", "cpu_atom/cpus": "4-11"})
    everything = set(range(12))
    assert [assign_cpus(everything, 0, 1, n, hybrid)[0] for n in (None, 4, 5)] == [
        {0, 1, 2, 3},
        {0, 1, 2, 3},
        everything,
    ]
