"""The adapter for DeepEP's `ElasticBuffer` with `do_expand`: it receives one row for each (token,
expert) pair, sorted by expert.

Its `combine` adds up rows without weights, so the adapter multiplies each row by its weight first.
That rounds once more.

T: tokens of this rank. K: experts per token. D: model width. W: width of a sent row, padded.
P: rows received.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeserve.moe.all2all.base import All2AllCaps, Inbound, Layout, Ticket
from moeserve.moe.all2all.deepep.base import DeepEP, SentRows, caps_with, pad_width, trim_padding
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.wire_format import BLOCK, FP8, Fp8Wire
from moeserve.moe.pending import Transfer
from moeserve.moe.routing import Routing
from moeserve.moe.ubatch import UBatch

ROW_BYTES = 512  # the length of a row must be a multiple
MAX_WIDTH = 8192  # supported by the kernels
MAX_TOKENS = 4096  # per dispatch; the buffer has space for that many tokens of each rank


class DeepEPElastic(DeepEP):
    """The adapter of `ElasticBuffer`, in deterministic mode: the rows of an expert are in the order
    (rank, token).
    """

    # Facts about the kernels and the package, see `DeepEP`
    name = "deepep_v2"
    needs = "ElasticBuffer"
    max_top_k = 32
    whole_nodes = False
    takes_sms = True
    nccl = True
    _sms = 0  # multiprocessors of a dispatch (and its combine): the buffer's wish, or our limit

    def caps_of(self, facts: BackendFacts) -> All2AllCaps:
        # The kernels are compiled for each value of max_tokens, so round up to a power of two.
        power = 1 << max(0, facts.max_tokens - 1).bit_length()
        return caps_with(
            self.name,
            Layout.GROUPED,
            max_tokens=min(MAX_TOKENS, power),
            pad_hidden=lambda width: _padded(
                width, ROW_BYTES // (1 if facts.wire.name == FP8 else 2)
            ),
            supports_world_size=lambda size: size >= 2,
            why_not_recordable="deepep_v2 counts the received rows on the host",
        )

    def open(self, group: Any) -> Any:
        buffer = self.lib.ElasticBuffer(
            group,
            num_max_tokens_per_rank=self.max_tokens,
            hidden=self.width,
            num_topk=self.facts.top_k,
            use_fp8_dispatch=self.fp8,
            deterministic=True,
            num_cpu_timeout_secs=math.ceil(self.deadline_s),
            explicitly_destroy=True,
        )
        self._sms = min(
            self.facts.comm_sms, buffer.get_theoretical_num_sms(self.num_experts, self.facts.top_k)
        )
        return buffer

    def leave(self) -> None:
        super().leave()
        # deep_ep's communicators would keep the process group, and rank 0's store, alive for ever.
        self.lib.utils.comm.destroy_all_managed_nccl_comm()

    def dispatch(self, x_TD: Tensor, routing: Routing, ubatch: UBatch) -> Transfer[Ticket]:
        buffer = self.buffer
        x_TD, ids_TK, weights_TK = _at_least_one_row(
            x_TD, self.ids_of(routing), routing.weights_TK.contiguous()
        )
        assert len(x_TD) <= self.max_tokens, f"{len(x_TD)} tokens of at most {self.max_tokens}"
        x_TW = pad_width(x_TD, self.width)
        timer = self.comm.watch()
        with self.calling(buffer):
            rows, _, weights_P, handle, event = buffer.dispatch(
                _pack_fp8(x_TW) if self.fp8 else x_TW,
                topk_idx=ids_TK,
                topk_weights=weights_TK,
                num_experts=self.num_experts,
                num_max_tokens_per_rank=self.max_tokens,
                expert_alignment=1,
                do_cpu_sync=True,
                do_expand=True,
                num_sms=self._sms,
                **_after(buffer.capture()),
            )

        def receive() -> Ticket:
            with self.calling(buffer), timer:
                event.current_stream_wait()
            counts_e = np.array(handle.num_recv_tokens_per_expert_list, np.int64)
            rows_PD, scales = trim_padding(rows, x_TD.shape[1])
            inbound = Inbound(
                Layout.GROUPED,
                rows_PD.contiguous(),
                counts_e=counts_e,
                ends_e=counts_e.cumsum(),
                scales=scales,
            )
            return Ticket(inbound, routing, private=(buffer, handle, weights_P))

        return Transfer(receive)

    def combine(
        self, ticket: Ticket, y: Tensor, out_TD: Tensor, ubatch: UBatch
    ) -> Transfer[Tensor]:
        ticket.use()
        buffer, handle, weights_P = ticket.private
        rows = weights_P.shape[0]
        weighted_PD = y.new_empty((rows, y.shape[1]))
        torch.mul(y[:rows], weights_P[:, None], out=weighted_PD)  # computed in fp32, then rounded
        timer = self.comm.watch()
        with self.calling(buffer):
            home_TW, _, event = buffer.combine(
                pad_width(weighted_PD, self.width), handle, **_after(buffer.capture())
            )

        def receive() -> Tensor:
            with self.calling(buffer), timer:
                event.current_stream_wait()
            tokens, width = out_TD.shape
            # Drops the padding, and the placeholder row of a rank without tokens.
            return out_TD.copy_(home_TW[:tokens, :width])

        return Transfer(receive)


def _pack_fp8(x_TW: Tensor) -> SentRows:
    """Return (elements, scales) with the same bits as `Fp8Wire`."""
    width = x_TW.shape[1]
    rows_TB = Fp8Wire().encode(x_TW)
    data_TW = rows_TB[:, :width].contiguous().view(torch.float8_e4m3fn)
    scale_Tb = rows_TB[:, width : width + 4 * (width // BLOCK)].contiguous().view(torch.float32)
    return data_TW, scale_Tb


def _padded(width: int, step: int) -> int | None:
    """Return `width` rounded up to a multiple of `step`, or None if that is more than MAX_WIDTH.

    2880, 256 -> 3072
    """
    wide = -(-width // step) * step
    return wide if wide <= MAX_WIDTH else None


def _after(event: Any) -> dict[str, Any]:
    """Return the arguments that make a call run on the buffer's own stream, after `event`."""
    return {
        "previous_event": event,
        "async_with_compute_stream": True,
        "allocate_on_comm_stream": True,
    }


def _at_least_one_row(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the arguments, or a placeholder row without experts for a rank without tokens.

    The other ranks wait for this rank's counts, which are sent only together with rows.
    """
    if x_TD.shape[0]:
        return x_TD, ids_TK, weights_TK
    width = x_TD.shape[1]
    top_k = ids_TK.shape[1]
    return (
        x_TD.new_zeros((1, width)),
        ids_TK.new_full((1, top_k), -1),
        weights_TK.new_zeros((1, top_k)),
    )
