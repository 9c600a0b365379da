"""Settings here that several flags of another server make together."""

import argparse
from collections.abc import Callable, Mapping

import msgspec

from moeserve.cli.settings import parse_int
from moeserve.errors import ConfigError

# Methods of vLLM, SGLang and llama.cpp that have another name in --speculate.
_METHODS = {
    "draft_model": "model",
    "draft-simple": "model",
    "standalone": "model",
    "eagle3": "eagle",
    "draft-eagle3": "eagle",
    "nextn": "mtp",
    "draft-mtp": "mtp",
    "ngram-simple": "ngram",
}
_OWN_METHODS = ("model", "eagle", "mtp", "ngram", "suffix")
_REMEDY = "use --speculate, e.g. ngram:4"
_MASTER_PORT = "29501"  # vLLM's default


def _speculate(parts: Mapping[str, str]) -> str:
    """Return the value of --speculate. parts: method, model, tokens, drafts (another name of
    tokens, which SGLang gives beside them), or config, vLLM's JSON object.
    """
    if "config" in parts and len(parts) > 1:
        raise ConfigError("give either the JSON object or the other flags")
    given = _speculative_config(parts["config"]) if "config" in parts else parts
    model = given.get("model")
    method = given.get("method", "draft_model" if model else "ngram").lower()
    own_method = "mtp" if method.endswith("mtp") else _METHODS.get(method, method)
    if own_method == "eagle" and model is None:  # SGLang's name for the model's own MTP layers
        own_method = "mtp"
    if own_method not in _OWN_METHODS:
        raise ConfigError(f"speculation by {method} has no counterpart; {_REMEDY}")
    if own_method in ("model", "eagle"):
        if model is None:
            raise ConfigError(f"speculation by {method} needs a draft model; {_REMEDY}")
    elif model is not None:
        raise ConfigError(f"speculation by {method} needs no draft model; {_REMEDY}")
    tokens = given.get("tokens", given.get("drafts"))
    return ":".join(part for part in (own_method, model, tokens) if part is not None)


def _speculative_config(text: str) -> dict[str, str]:
    names = {"method": "method", "model": "model", "num_speculative_tokens": "tokens"}
    with ConfigError.instead_of(msgspec.MsgspecError, "expected a JSON object", f"; {_REMEDY}"):
        config = msgspec.json.decode(text, type=dict[str, object])
    if unknown := config.keys() - names.keys():
        raise ConfigError(f"{', '.join(sorted(unknown))}: no counterpart; {_REMEDY}")
    return {names[key]: str(value) for key, value in config.items() if value is not None}


def _redundant_experts(parts: Mapping[str, str]) -> str:
    with ConfigError.instead_of(msgspec.MsgspecError, "expected a JSON object"):
        config = msgspec.json.decode(parts["config"], type=dict[str, object])
    return str(config.get("num_redundant_experts", 0))


def _rendezvous(parts: Mapping[str, str]) -> str:
    if "host" not in parts:
        raise ConfigError("give the address of machine 0 too, or --rendezvous HOST:PORT")
    host = parts["host"]
    if ":" in host:
        host = f"[{host}]"
    return f"{host}:{parts.get('port', _MASTER_PORT)}"


def _split_attention(args: argparse.Namespace, flag: str, num_groups: str) -> str:
    """Set `args.dp` and `args.tp` for SGLang's data-parallel attention. Return a note.

    There, tp counts all ranks, and attention is split among groups of them. Here a group is an
    engine, and tp counts its ranks.

    num_groups: the number of groups for each replica; "dp": args.dp groups in all.
    """
    if args.tp is None:
        raise ConfigError(f"{flag} needs --tp beside it, which counts all ranks")
    dp, tp = _ranks(args, flag)
    groups = dp if num_groups == "dp" else _number(flag, num_groups)
    if groups < 1 or tp % groups:
        raise ConfigError(f"{flag}: {tp} ranks cannot be split into {groups} groups")
    args.tp = str(tp // groups)
    args.dp = str(groups if num_groups == "dp" else dp * groups)
    return f"{flag} with {tp} ranks is --dp {args.dp} --tp {args.tp}"


def _shard_experts(args: argparse.Namespace, flag: str, size: str) -> str:
    """Set `args.ep` for SGLang's number of ranks that share the experts. Return a note."""
    dp, tp = _ranks(args, flag)
    number = _number(flag, size)
    if number not in (1, tp, dp * tp):
        raise ConfigError(f"{flag} {size}: --ep on shards the experts over all {dp * tp} ranks")
    own_value = "off" if number == 1 < dp * tp else "on"
    if args.ep not in (None, own_value):
        raise ConfigError(f"{flag} {size} and another flag disagree: both set ep")
    args.ep = own_value
    return f"{flag} {size} with {dp * tp} ranks is --ep {args.ep}"


def _ranks(args: argparse.Namespace, flag: str) -> tuple[int, int]:
    return _number(flag, args.dp or "1"), _number(flag, args.tp or "1")


def _number(flag: str, text: str) -> int:
    with ConfigError.instead_of(ValueError, flag):
        return parse_int(text)


# Return a setting's value from its parts, and raise ConfigError.
COMPOSERS: Mapping[str, Callable[[Mapping[str, str]], str]] = {
    "speculate": _speculate,
    "rendezvous": _rendezvous,
    "redundant_experts": _redundant_experts,
}
# What a note says about the parts that have no counterpart.
REMAINDERS = {
    "redundant_experts": "; its other values have no effect: --rebalance says whether experts move"
}
# Change the parsed arguments for a flag and its value, and return a note. In order: experts are
# sharded over the ranks that attention leaves.
ADAPTERS: Mapping[str, Callable[[argparse.Namespace, str, str], str]] = {
    "dp": _split_attention,
    "ep": _shard_experts,
}
