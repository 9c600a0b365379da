"""Parallel settings that are rejected before any process is started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moeserve.cluster.check_parallel import check_parallel
from moeserve.config import config_of
from moeserve.errors import ConfigError
from moeserve.loader.model_dir import resolve_model_dir
from moeserve.models.hf_config import read_model_spec


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"all2all": "torhc"}, "all2all: 'torhc' is unknown; did you mean 'torch'"),
        ({"dp": 2, "tp": 3}, "choose tp from 1, 2, 4"),
        ({"dp": 2, "redundant_experts": 100}, "at most 8 are of use"),
        (
            {"dp": 2, "nnodes": 3, "rendezvous": "a:1", "cluster_key_file": "k"},
            "needs an engine; give at least --dp 3",
        ),
        ({"redundant_experts": 1}, "needs experts sharded over several ranks"),
        (
            {"dp": 2, "ep": "off", "redundant_experts": 1},
            "needs experts sharded over several ranks",
        ),
    ],
    ids=str,
)
def test_settings_that_cannot_work(settings: dict[str, object], reason: str) -> None:
    config = config_of("demo", **settings)
    with pytest.raises(ConfigError, match=reason):
        check_parallel(config, read_model_spec(resolve_model_dir("demo")))


def test_the_check_needs_no_torch() -> None:
    code = "import sys, moeserve.cluster.check_parallel as _; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
