"""Other engines' fused-MoE Triton kernels, loaded from their own files at run time.

Nothing of theirs is kept here. A folder has `vllm/` and `sglang/`, each with (parts of) that
engine's unpacked wheel: the kernel's file and the JSON tables of launch parameters. Only the
functions that Triton compiles are loaded from the file, so none of its imports is needed.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moeserve.kernels.activation import act_mul
from moeserve.ops.rules import SWIGLU
from tools.gpu.bench import Run
from tools.gpu.references import align_reference

FILES = {"vllm": "fused_moe.py", "sglang": "fused_moe_triton_kernels.py"}
KERNEL = "fused_moe_kernel"
HEADER = "import triton\nimport triton.language as tl\n\n"
TILE_KEYS = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
NONE = ("a_desc", "b_desc", "bias_ptr", "b_bias_ptr", "a_scale_ptr", "b_scale_ptr", "add_mask_ptr")
ZERO = (
    "stride_asm",
    "stride_ask",
    "stride_bse",
    "stride_bsk",
    "stride_bsn",
    "stride_bias_e",
    "stride_bias_n",
    "stride_bbe",
    "stride_bbn",
    "group_n",
    "group_k",
)
OFF = (
    "use_fp8_w8a8",
    "use_int8_w8a8",
    "use_int8_w8a16",
    "per_channel_quant",
    "HAS_BIAS",
    "SWAP_AB",
    "swap_ab",
    "USE_TD",
    "naive_block_assignment",
    "c_sorted",
    "filter_expert",
    "FUSE_ADD_TO_OUTPUT",
    "MASK_OUTPUT",
    "FUSE_SUM_ALL_REDUCE",
    "LORA_PRESERVE_BASE",
    "FUSE_SWIGLU",
    "USE_GDC",
    "GDC_EARLY",
)


@dataclass(frozen=True, slots=True)
class Peer:
    kernel: Any
    folder: Path


def load_peers(folder: Path | None) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the kernels that are present, and a note for each that is missing."""
    found = {}
    notes = {}
    for name, file in FILES.items():
        if folder is None:
            notes[name] = "skipped: no --peers folder was given"
        elif not (paths := sorted((folder / name).rglob(file))):
            notes[name] = f"skipped: there is no {file} under {folder.name}/{name}"
        else:
            found[name] = Peer(load_kernel(paths[0]), folder / name)
            notes[name] = f"loaded from {paths[0].relative_to(folder)}"
    return found, notes


def load_kernel(path: Path) -> Any:
    """Load a kernel and the functions that it calls, without the rest of its module.

    They are written to a file of their own, because Triton reads a kernel's source from its file.
    """
    source = path.read_text("utf-8")
    jitted = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and _is_jitted(node)
    ]
    parts = ["\n".join(map(ast.unparse, node.decorator_list)) for node in jitted]
    bodies = [ast.get_source_segment(source, node) or "" for node in jitted]
    text = HEADER + "\n\n\n".join(
        f"@{mark}\n{body}" for mark, body in zip(parts, bodies, strict=True)
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py", prefix="peer_", delete=False) as file:
        file.write(text)
    spec = importlib.util.spec_from_file_location(Path(file.name).stem, file.name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, KERNEL)


def _is_jitted(node: ast.FunctionDef) -> bool:
    return [ast.unparse(mark) for mark in node.decorator_list] == ["triton.jit"]


@dataclass(frozen=True, slots=True)
class PeerMoe:
    """A peer's kernel with its table for a shape."""

    peer: Peer
    experts: int
    width: int
    dim: int

    def config(self, tokens: int) -> dict[str, int]:
        """Return the table's entry for the nearest number of tokens on this GPU.

        Without a table it is the configuration with which both engines start.
        """
        device = (
            torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
        )
        name = f"E={self.experts},N={self.width},device_name={device}.json"
        tables = sorted(
            self.peer.folder.rglob(name), key=lambda path: _version(path) == triton.__version__
        )
        if tables:
            table = {
                int(k): v
                for k, v in json.loads(tables[-1].read_text("utf-8")).items()
                if k.isdecimal()
            }
            return dict(table[min(table, key=lambda known: abs(known - tokens))])
        few = tokens <= self.experts
        tile = (16, 64, 64, 1) if few else (64, 64, 32, 8)
        return dict(zip(TILE_KEYS, tile, strict=True)) | {
            "num_warps": 4,
            "num_stages": 4 if few else 3,
        }

    def prepare(self, x: Tensor, ids: Tensor, shares: Tensor, w13: Tensor, w2: Tensor) -> Run:
        """Return a call of both products with the activation between them.

        Rows are sorted and padded here, outside the timing. The result is [M, K, D], each row
        multiplied by its weight.
        """
        tokens, top_k = ids.shape
        config = self.config(tokens)
        to = align_reference(ids, self.experts, config["BLOCK_SIZE_M"])
        sorted_ids, num_padded = padded(
            to.order_N, to.expert_Z, to.row_Z, to.ends_e, to.block_m, ids.numel()
        )

        def product(source: Tensor, w: Tensor, out: Tensor, fan: int, weighted: bool) -> None:
            values = self._arguments(
                source, w, out, shares, sorted_ids, to.expert_Z, num_padded, fan, weighted, config
            )
            tiles = math.ceil(len(sorted_ids) / config["BLOCK_SIZE_M"])
            grid = (tiles * math.ceil(w.shape[1] / config["BLOCK_SIZE_N"]),)
            self.peer.kernel[grid](
                **values, num_warps=config["num_warps"], num_stages=config["num_stages"]
            )

        def run() -> Tensor:
            gate_up = x.new_empty(tokens * top_k, w13.shape[1])
            y = x.new_empty(tokens, top_k, self.dim)
            product(x, w13, gate_up, top_k, False)
            product(act_mul(gate_up, SWIGLU), w2, y.view(-1, self.dim), 1, True)
            return y

        return run

    def _arguments(
        self,
        x: Tensor,
        w: Tensor,
        out: Tensor,
        shares: Tensor,
        sorted_ids: Tensor,
        slots: Tensor,
        num_padded: Tensor,
        fan: int,
        weighted: bool,
        config: dict[str, int],
    ) -> dict[str, Any]:
        """Return the arguments by the names that both engines' kernels use."""
        known: dict[str, Any] = {
            "a_ptr": x,
            "b_ptr": w,
            "c_ptr": out,
            "topk_weights_ptr": shares,
            "sorted_token_ids_ptr": sorted_ids,
            "expert_ids_ptr": slots,
            "num_tokens_post_padded_ptr": num_padded,
            "N": w.shape[1],
            "K": w.shape[2],
            "EM": len(sorted_ids),
            "num_valid_tokens": shares.numel(),
            "stride_am": x.stride(0),
            "stride_ak": x.stride(1),
            "stride_be": w.stride(0),
            "stride_bk": w.stride(2),
            "stride_bn": w.stride(1),
            "stride_cm": out.stride(0),
            "stride_cn": out.stride(1),
            "MUL_ROUTED_WEIGHT": weighted,
            "top_k": fan,
            "ROUTER_TOPK": shares.shape[1],
            "compute_type": getattr(tl, str(x.dtype).removeprefix("torch.")),
            "SPLIT_K": 1,
            "even_Ks": w.shape[2] % config["BLOCK_SIZE_K"] == 0,
        }
        known |= {name: config[name] for name in TILE_KEYS}
        known |= dict.fromkeys(NONE) | dict.fromkeys(ZERO, 0) | dict.fromkeys(OFF, False)
        names = self.peer.kernel.arg_names
        unknown = [name for name in names if name not in known]
        assert not unknown, f"the kernel has arguments that are not known here: {unknown}"
        return {name: known[name] for name in names}


def _version(path: Path) -> str:
    """Return the version in a path: triton_3_6_0/x.json -> 3.6.0."""
    return path.parent.name.removeprefix("triton_").replace("_", ".")


def padded(
    order: Tensor | None, slots: Tensor, rows: Tensor, ends: Tensor, block_m: int, none: int
) -> tuple[Tensor, Tensor]:
    """Return the pair of each tile's rows, and the number of rows.

    Rows of a tile beyond its expert's last one are `none`. For example, order [1, 0], slots [0, 1],
    first rows [0, 1], ends [1, 2], tiles of 2, none 2 give [1, 2, 0, 2], [4].
    """
    assert order is not None
    places = rows[:, None].long() + torch.arange(block_m, device=rows.device)
    inside = places < ends[slots.long()][:, None]
    pairs = torch.where(inside, order[places.clamp(max=len(order) - 1)], none)
    return pairs.flatten().int(), torch.tensor(
        [pairs.numel()], dtype=torch.int32, device=rows.device
    )
