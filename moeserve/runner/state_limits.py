"""Numbers of states of recurrent layers: those that requests need, and those that the prefix cache keeps."""

from dataclasses import dataclass, replace

from moeserve.config import Config
from moeserve.engine.blocks import STATES_HELD
from moeserve.errors import ConfigError, DoesNotFit
from moeserve.models.spec import ModelSpec

USUAL_LEN = 4096  # tokens per request whose states a shared host keeps


@dataclass(frozen=True, slots=True)
class StateRoom:
    """Blocks of states, the null block included, and of those that the host store can hold; the memory that both leave
    to other blocks, as a config and a budget; and a note for the user."""

    num_states: int
    num_stored: int
    config: Config
    budget: int
    notes: tuple[str, ...] = ()


def check_block_size(config: Config, spec: ModelSpec) -> None:
    """Raises ConfigError if blocks are no whole number of tiles, or if no layer has entries per token."""
    tiles = {rule.tile for rule in spec.kv_rules if rule.tile is not None}
    size = config.cache.block_size
    if wrong := sorted(tile for tile in tiles if size % tile):
        raise ConfigError(
            f"block_size={size}: the recurrent layers of {spec.architecture} work on tiles of {wrong[0]} tokens, of "
            "which a block must be a whole number; use block_size=16, 32 or 64"
        )
    if tiles and all(rule.tile is not None for rule in spec.kv_rules):
        raise ConfigError(f"{spec.architecture}: every layer is recurrent, and one with a cache per token is needed")


def state_room(config: Config, state_bytes: int, budget: int, *, fill: bool) -> StateRoom:
    """Shares out the budget. state_bytes: of a block of states over all layers; 0: the model has none.

    fill: take the whole share rather than what the requests can use. Fewer requests run at once where their states do
    not fit. Raises DoesNotFit if not even one's do.
    """
    if not state_bytes:
        return StateRoom(0, 0, config, budget)
    asked = config.cache.kv_cache_bytes
    total = budget if asked is None else min(asked, budget)
    room = int(config.cache.state_share * total)
    affordable = room // state_bytes
    fits = (affordable - 1) // STATES_HELD
    if fits < 1:
        raise DoesNotFit(
            f"states of recurrent layers take {state_bytes:,} bytes a block, a request needs {STATES_HELD}, and "
            f"{room:,} bytes are there for them. Raise --memory-utilization, --kv-cache-bytes or state_share."
        )
    running = config.scheduler.max_num_seqs
    notes: tuple[str, ...] = ()
    if fits < running:
        notes = (f"max_num_seqs reduced from {running} to {fits}: the states of more requests do not fit",)
    running = min(fits, running)
    useful = running * (STATES_HELD + USUAL_LEN // config.cache.block_size) + 1
    number = affordable if fill or asked is not None else min(affordable, useful)
    left = replace(
        config,
        scheduler=replace(config.scheduler, max_num_seqs=running),
        cache=replace(config.cache, kv_cache_bytes=None if asked is None else asked - number * state_bytes),
    )
    stored = int(config.cache.state_share * config.cache.host_store_bytes) // state_bytes
    left = replace(left, cache=replace(left.cache, host_store_bytes=left.cache.host_store_bytes - stored * state_bytes))
    return StateRoom(number, stored, left, budget - number * state_bytes, notes)
