"""Settings that are chosen so that a model fits into memory: their order, what they cost, and what
is never changed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moeserve.config import config_of
from moeserve.engine.blocks import KVGroup
from moeserve.engine.kv_rule import KVRule
from moeserve.errors import ConfigError, DoesNotFit, IncompressibleWeights
from moeserve.loader.packed_cache import HEADER_BYTES
from moeserve.models.hf_config import read_model_spec
from moeserve.moe.experts import native as native_experts
from moeserve.ops.native import native
from moeserve.runner import cpu, host_memory
from moeserve.runner.cpu import CPUModelRunner
from moeserve.runner.fit import (
    EXPERTS_ON_DISK,
    IN_12_BITS,
    INT8_KV,
    LOADED_BYTES,
    SLOT_BYTES,
    Alternatives,
    Choices,
    MemoryPlan,
    decide_once,
)
from moeserve.runner.host_memory import share_of_host
from moeserve.runner.limits import MemoryFacts, check, resolve, with_step_tokens
from moeserve.runner.weight_sizes import WeightSizes
from tests.runner.harness import Driver, Request, greedy, spec_of
from tests.runner.test_packed_cache import PROMPT, same

MIB = 2**20
GIB = 2**30
FULL = (KVGroup(KVRule(), 16, (0, 1)),)
BLOCK = MIB  # bytes of a KV block of 16 tokens
QUARTER = GIB // 4
SIZES = WeightSizes(total=10 * GIB, experts=9 * GIB, layer=QUARTER, expert=4 * MIB, loading=QUARTER)
IN_12 = WeightSizes(total=8 * GIB, experts=7 * GIB, layer=QUARTER, expert=MIB, loading=QUARTER)
WORKSPACE = QUARTER


def plan(free: float, obstacles: tuple[str, ...] = (), **settings: Any) -> MemoryPlan:
    """Return the plan of a model of 10 GiB with a context of 65,536 tokens (4 GiB), by GiB free."""
    spec = spec_of(max_position=65536)
    config = with_step_tokens(config_of(None, **({"max_num_seqs": 1} | settings)), 2048)

    def longest(config: Any, budget: int) -> int:
        size = BLOCK // 2 if config.cache.kv_cache_dtype == "int8" else BLOCK
        return resolve(config, spec, FULL, size, budget, fill=False)[0].max_model_len

    return MemoryPlan(
        config=config,
        max_position=spec.max_position,
        memory=MemoryFacts(limit=int((free + 1) * GIB), used=GIB // 8, free=int(free * GIB)),
        sizes=SIZES,
        other_weights=0,
        workspace=WORKSPACE,
        experts_per_token=8,
        longest=longest,
        find_alternatives=lambda: Alternatives(
            obstacles=dict.fromkeys(obstacles, "because of a test"),
            compression="experts",
            sizes_in_12_bits=IN_12,
        ),
    )


@pytest.mark.parametrize(
    ("free", "obstacles", "expected"),
    [
        (40, (), ("float", False, "off")),
        (11, (), ("float", False, "off")),  # with a shorter context
        (10.8, (), ("int8", False, "off")),
        (10.8, (INT8_KV,), ("float", False, "experts")),
        (10.5, (), ("float", False, "experts")),
        (10.5, (IN_12_BITS,), ("float", True, "off")),
        (8.6, (), ("int8", False, "experts")),
        (8.6, (INT8_KV,), ("float", True, "experts")),
        (8, (), ("float", True, "experts")),
        (8, (IN_12_BITS,), ("float", True, "off")),
        (2, (IN_12_BITS,), ("float", True, "off")),
        (1.8, (IN_12_BITS,), ("int8", True, "off")),
        (8.6, (EXPERTS_ON_DISK,), ("int8", False, "experts")),
    ],
)
def test_choices_are_made_in_order_and_only_if_they_help(
    free: float, obstacles: tuple[str, ...], expected: tuple[str, bool, str]
) -> None:
    made = plan(free, obstacles).choose()
    found = made.kv_cache_dtype, made.expert_memory is not None, made.lossless_compression
    assert found == expected
    names = ("kv_cache_dtype: int8", "expert_memory: ", "lossless_compression: experts")
    chosen = (expected[0] == "int8", expected[1], expected[2] == "experts")
    texts = [name for name, was_chosen in zip(names, chosen, strict=True) if was_chosen]
    assert len(made.notes) == len(texts)
    for note, text in zip(made.notes, texts, strict=True):
        assert note.startswith(text)
        assert "It costs" in note
        assert "--fit off" in note


@pytest.mark.parametrize("free", [2, 4, 6, 9, 10.5])
def test_experts_in_memory_leave_room_for_everything_else(free: float) -> None:
    it = plan(free, (IN_12_BITS,))
    chosen = it.choose()
    assert chosen.expert_memory is not None
    taken = SIZES.total - SIZES.experts + chosen.expert_memory + WORKSPACE + LOADED_BYTES
    left = it.memory.free - taken
    kv_bytes = 4096 // 16 * BLOCK
    assert left >= kv_bytes
    # Left over is what --memory-utilization keeps free, and the error of sizes.
    assert left <= kv_bytes + 0.1 * it.memory.limit + SIZES.experts / 60
    assert it.longest(chosen.apply(it.config), left) >= 4096


@pytest.mark.parametrize(
    ("free", "settings", "values"),
    [
        # Each is refused although a choice that the user has excluded would help.
        (10.8, {"kv_cache_dtype": "float"}, "max_model_len=4096 needs 2[5-9][0-9].00 MiB"),
        (11, {"max_model_len": 65536}, "max_model_len=65536 needs 4.*max_model_len=.* would fit"),
        (11, {"kv_cache_bytes": 2 * GIB}, f"kv_cache_bytes={2 * GIB} .* does not fit"),
        (9, {"expert_memory": 9 * GIB}, "weights that this process loads take 10,240.00 MiB"),
    ],
)
def test_what_the_user_set_is_refused_by_name_and_never_changed(
    free: float, settings: dict[str, Any], values: str
) -> None:
    excluded = [IN_12_BITS]
    if "expert_memory" not in settings and "max_model_len" not in settings:
        excluded += [EXPERTS_ON_DISK]
    if "max_model_len" in settings or "kv_cache_bytes" in settings:
        excluded += [EXPERTS_ON_DISK, INT8_KV]
    if "kv_cache_dtype" in settings:
        excluded += [INT8_KV]
    if "expert_memory" in settings:
        excluded += [EXPERTS_ON_DISK]
    with pytest.raises(DoesNotFit, match=values) as refused:
        plan(free, tuple(excluded), **settings).choose()
    assert "experts on disk (because of a test)" in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "float"},
        {"kv_cache_dtype": "int8"},
        {"expert_memory": 5 * GIB},
        {"lossless_compression": "off"},
        {"lossless_compression": "all"},
        {"max_model_len": 9000},
        {"kv_cache_bytes": GIB},
    ],
)
def test_choices_keep_given_settings(settings: dict[str, Any]) -> None:
    config = config_of(None, **settings)
    every = Choices(kv_cache_dtype="int8", expert_memory=7, lossless_compression="experts")
    applied = every.apply(config)
    for name, value in settings.items():
        section = applied.cache if hasattr(applied.cache, name) else applied.model
        assert getattr(section, name) == value
    assert applied.model.fit == "off"
    assert Choices().apply(config_of(None)).cache.kv_cache_dtype == "float"


def test_ranks_that_get_the_choices_take_them_with_latent_attention(make_checkpoint: Any) -> None:
    """`float` is the dtype of activations, which is all that a cache of latents supports."""
    spec = read_model_spec(make_checkpoint("deepseek_v3").path)
    check(Choices().apply(config_of(None)), spec)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=int8: latents \(MLA\)"):
        check(config_of(None, kv_cache_dtype="int8"), spec)


def test_a_context_below_4096_is_refused_with_the_one_that_fits() -> None:
    everything = (INT8_KV, EXPERTS_ON_DISK, IN_12_BITS)
    with pytest.raises(DoesNotFit, match=r"max_model_len=4096 .*max_model_len=(\d+) would") as one:
        plan(10.8, everything).choose()
    would_fit = int(str(one.value).split("max_model_len=")[2].split(" ")[0])
    assert 16 <= would_fit < 4096
    plan(10.8, everything, max_model_len=would_fit).choose()
    with pytest.raises(DoesNotFit, match=f"max_model_len={would_fit + 16} needs"):
        plan(10.8, everything, max_model_len=would_fit + 16).choose()


def test_all_ranks_of_a_server_have_the_choices_of_the_first(tmp_path: Path) -> None:
    made: list[int] = []
    found: list[Choices] = []

    def decide() -> Choices:
        made.append(threading.get_ident())
        return Choices(expert_memory=len(made), lossless_compression="experts", notes=("a note",))

    threads = [
        threading.Thread(target=lambda: found.append(decide_once(str(tmp_path), decide)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == [found[0]] * 8
    # Two ranks find that the weights cannot be compressed: one decides for both.
    again = [
        decide_once(str(tmp_path), lambda: Choices(expert_memory=9), again=True) for _ in range(2)
    ]
    assert again == [Choices(expert_memory=9)] * 2
    assert decide_once(str(tmp_path), decide) == again[0]
    assert decide_once("", decide).expert_memory == 2


def test_a_refusal_is_not_kept(tmp_path: Path) -> None:
    def refuse() -> Choices:
        raise DoesNotFit("too large")

    with pytest.raises(DoesNotFit):
        decide_once(str(tmp_path), refuse)
    assert decide_once(str(tmp_path), Choices) == Choices()


def test_a_decision_that_was_cut_off_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:5])
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", cut_off)
        with pytest.raises(OSError, match="killed"):
            decide_once(str(tmp_path), Choices)
    assert decide_once(str(tmp_path), Choices) == Choices()


# A real model.


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets how much memory every start finds."""

    def set_to(free: int) -> None:
        facts = MemoryFacts(limit=1 << 40, used=0, free=free)
        monkeypatch.setattr(cpu, "host_memory", lambda: facts)

    monkeypatch.setattr(cpu, "RESERVE_BYTES", 0)
    monkeypatch.setattr(cpu, "RESERVE_PER_TOKEN", 0)
    set_to(GIB)
    return set_to


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with 96 MiB of experts, without weights."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 256,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "max_position_embeddings": 16384,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return folder


def runner_of(path: Path, packed: Path, **settings: Any) -> CPUModelRunner:
    values = {
        "max_num_seqs": 2,
        "threads": 1,
        "max_num_batched_tokens": 64,
        "load_format": "dummy",
        "packed_cache": str(packed),
    }
    return CPUModelRunner(config_of(path, **(values | settings)), read_model_spec(path), path)


def needs_choices(path: Path, packed: Path, **settings: Any) -> bool:
    runner = runner_of(path, packed, **settings)
    try:
        runner.fit()
    except DoesNotFit:
        return True
    return bool(runner.notes)


def least_free(path: Path, packed: Path, free_bytes: Any, **settings: Any) -> int:
    """Return the least free bytes with which a start needs no choices, to a MiB."""
    low, high = 0, GIB
    while high - low > MIB:
        middle = (low + high) // 2
        free_bytes(middle)
        low, high = (middle, high) if needs_choices(path, packed, **settings) else (low, middle)
    return high


def compression_of(runner: CPUModelRunner) -> str:
    return runner.config.model.lossless_compression


def generate(runner: CPUModelRunner) -> Request:
    driver = Driver(runner)
    request = driver.add(Request(list(PROMPT), greedy()))
    driver.generate(request, 5, chunk=16)
    return request


needs_native = pytest.mark.skipif(native() is None, reason="needs the native kernels")


@needs_native
@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"lossless_compression": "experts"}],
    ids=str,
)
def test_sizes_from_headers_are_those_of_packed_weights(
    settings: dict[str, Any], model: Path, tmp_path: Path, free_bytes: Any
) -> None:
    runner = runner_of(model, tmp_path, expert_memory=8 * MIB, **settings)
    try:
        sizes = runner.fit().sizes
    except ConfigError as error:
        pytest.skip(str(error))  # no AVX512-BF16
    runner.prepare()
    (file,) = tmp_path.glob("*.packed")
    assert file.stat().st_size - HEADER_BYTES == pytest.approx(sizes.total, rel=1 / 64)
    slot_bytes = runner.expert_cache.slot_bytes
    assert 0 <= slot_bytes - sizes.expert <= sizes.expert / 64 + SLOT_BYTES


UNROUNDED = {"kv_cache_dtype": "float", "lossless_compression": "off"}


@needs_native
def test_experts_on_disk_by_choice_have_the_tokens_of_those_in_memory(
    model: Path, tmp_path: Path, free_bytes: Any
) -> None:
    in_memory = runner_of(model, tmp_path / "none", **UNROUNDED)
    in_memory.prepare()
    assert in_memory.config.model.expert_memory is None
    assert in_memory.notes == []
    free_bytes(least_free(model, tmp_path, free_bytes, **UNROUNDED) - 32 * MIB)
    with pytest.raises(DoesNotFit, match=r"KV blocks .*packed_cache=off is set"):
        runner_of(model, tmp_path, **UNROUNDED, packed_cache="off").prepare()
    for _ in range(2):  # the start that writes the file, and one that finds it
        on_disk = runner_of(model, tmp_path, **UNROUNDED)
        on_disk.prepare()
        memory = on_disk.config.model.expert_memory
        assert memory is not None
        assert 32 * MIB < memory < 96 * MIB
        assert on_disk.notes[0].startswith("expert_memory: ")
        assert len(list(tmp_path.glob("*.packed"))) == 1
        same(generate(on_disk), generate(in_memory))


@needs_native
def test_int8_keys_and_values_by_choice_are_those_that_were_set(
    model: Path, tmp_path: Path, free_bytes: Any
) -> None:
    settings = {"lossless_compression": "off", "packed_cache": "off"}
    free_bytes(least_free(model, tmp_path, free_bytes, **settings) - 4 * MIB)
    chosen = runner_of(model, tmp_path, **settings)
    chosen.prepare()
    assert chosen.numerics["kv_cache_dtype"] == "int8"
    assert [note.split(" ")[0] for note in chosen.notes] == ["kv_cache_dtype:"]
    given = runner_of(model, tmp_path, **settings, kv_cache_dtype="int8", fit="off")
    given.prepare()
    same(generate(chosen), generate(given))


@needs_native
def test_without_room_on_the_disk_a_start_is_refused_and_says_why(
    model: Path, tmp_path: Path, free_bytes: Any
) -> None:
    free_bytes(least_free(model, tmp_path, free_bytes, **UNROUNDED) - 32 * MIB)
    with pytest.raises(
        DoesNotFit,
        match=r"kv_cache_dtype=float is set\), experts on disk \(.* may hold 0.00 MiB, but 9.* "
        r"are needed\), weights in 12 bits \(lossless_compression=off is set",
    ):
        runner_of(model, tmp_path, **UNROUNDED, packed_cache_bytes=1000).prepare()
    assert not list(tmp_path.iterdir())


@needs_native
def test_weights_that_cannot_be_compressed_are_loaded_otherwise(
    model: Path, tmp_path: Path, free_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not runner_of(model, tmp_path).fit().ops.supports_lossless:
        pytest.skip("needs AVX512-BF16")
    free_bytes(least_free(model, tmp_path, free_bytes) - 24 * MIB)
    settings = {"kv_cache_dtype": "float"}
    runner = runner_of(model, tmp_path, **settings)
    runner.folder = str(tmp_path)
    runner.fit()
    assert compression_of(runner) == "experts"

    with pytest.MonkeyPatch.context() as patch:

        def refuse(*args: object, **options: object) -> None:
            patch.undo()
            raise IncompressibleWeights("weights [1, 1] cannot be compressed")

        patch.setattr(native_experts, "pack", refuse)
        runner.prepare()
    assert compression_of(runner) == "off"
    assert runner.config.model.expert_memory is not None
    plain = runner_of(model, tmp_path, **settings, lossless_compression="off")
    plain.prepare()
    same(generate(runner), generate(plain))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_experts, "pack", refuse)
        asked = runner_of(model, tmp_path / "other", **settings, lossless_compression="experts")
        with pytest.raises(IncompressibleWeights):
            asked.prepare()


@needs_native
def test_a_restarted_rank_has_the_choices_of_its_first_start(
    model: Path, tmp_path: Path, free_bytes: Any
) -> None:
    settings = {"lossless_compression": "off", "packed_cache": "off"}
    least = least_free(model, tmp_path, free_bytes, **settings)
    free_bytes(least - 4 * MIB)
    first, second = (runner_of(model, tmp_path, **settings) for _ in range(2))
    first.folder = second.folder = str(tmp_path)
    first.fit()
    free_bytes(GIB)
    second.fit()
    assert first.kv_dtype == second.kv_dtype == torch.int8
    assert first.notes == second.notes != []


@needs_native
def test_fit_off_and_several_machines_choose_nothing(
    model: Path, tmp_path: Path, free_bytes: Any
) -> None:
    free_bytes(64 * MIB)
    for settings in ({"fit": "off"}, {"nnodes": 2}):
        runner = runner_of(model, tmp_path, **settings)
        runner.fit()
        assert runner.config == runner.given_config
        with pytest.raises(DoesNotFit):
            runner.prepare()


def test_a_rank_has_its_part_of_what_ranks_hold_and_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the other rank has loaded its weights already, or not yet, or this one restarts."""
    held = {"own": 0, "other": 0}
    monkeypatch.setattr(host_memory, "_other_ranks", lambda: ["other"])
    monkeypatch.setattr(
        host_memory, "_private_bytes", lambda rank: held["other" if rank == "other" else "own"]
    )

    def part(own: int, other: int, free: int) -> int:
        held.update(own=own, other=other)
        return share_of_host(MemoryFacts(limit=100, used=own, free=free), 2).free

    assert part(own=0, other=0, free=90) == 45
    assert part(own=0, other=40, free=50) == 45  # it has loaded its weights
    assert part(own=0, other=70, free=20) == 20  # it has more than its part
    assert part(own=40, other=40, free=10) == 5
    assert part(own=60, other=10, free=20) == 0
    assert share_of_host(MemoryFacts(100, 7, 90), 1) == MemoryFacts(100, 7, 90)
    assert share_of_host(MemoryFacts(100, 7, 90), 2).limit == 50
