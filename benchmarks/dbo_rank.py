"""One of the two ranks of benchmarks.dbo: runs the steps that it is ordered to and times them.

    python -m benchmarks.dbo_rank SETUP

SETUP is JSON (Setup). Each line of standard input is an Order; the answer is a line with its Steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Literal, get_args

import msgspec
import numpy as np
import torch

from benchmarks.dbo_link import ADDRESSES
from benchmarks.specs import Sizes
from moeserve.comm.gloo import Mesh
from moeserve.comm.members import Members
from moeserve.comm.world import World
from moeserve.engine.plan import I32, StepDecision, StepPlan, StepResult, best_split
from moeserve.engine.vote import Vote, decide
from moeserve.messages import TraceEvent
from moeserve.models.build import build_decoder
from moeserve.models.decoder import Decoder
from moeserve.models.load_plan import load_plan
from moeserve.moe.all2all.registry import BackendFacts
from moeserve.moe.all2all.torch_a2a import TorchAll2All
from moeserve.moe.all2all.wire_format import wire_of
from moeserve.moe.placement.placement import Placement
from moeserve.ops.inputs import GroupInputs, LayerCache, Positions, StepInputs
from moeserve.ops.pick import pick_ops
from moeserve.runner.dbo import OverlapPolicy
from moeserve.runner.ubatches import UBatchRunner

BLOCK = 64
CONTEXT = 256  # tokens before each decoding request
DTYPE = torch.float32

Phase = Literal["prefill", "decode"]
Mode = Literal["off", "on", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Setup(msgspec.Struct, frozen=True):
    """What a rank is started with."""

    rank: int
    sizes: Sizes
    tokens: int  # per rank in a prefill step
    prompt: int  # tokens of each request in it
    batch: int  # requests per rank in a decode step


class Order(msgspec.Struct, frozen=True):
    """Run `steps` steps."""

    phase: Phase
    mode: Mode
    steps: int = 1
    trace: bool = False
    encrypted: bool = False


class Step(msgspec.Struct, frozen=True):
    """The times of one step."""

    took_us: int
    ubatches: int
    comm_us: int
    exposed_us: int
    events: tuple[TraceEvent, ...] = ()  # if the step was traced


class Rank:
    """A rank's model and inputs. Before each step both ranks vote over a socket, as engines do."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.peer = _connect(setup.rank).makefile("rwb")
        self.ubatches = UBatchRunner(2)
        self.model, self.mesh = _build(setup)
        self.seal = self.mesh.seal
        spec = setup.sizes.spec()
        counts = np.full(setup.tokens // setup.prompt, setup.prompt, np.int32)
        self.inputs = {
            "prefill": (step_inputs(counts, 0), counts),
            "decode": (
                step_inputs(np.ones(setup.batch, np.int32), CONTEXT),
                np.ones(setup.batch, np.int32),
            ),
        }
        blocks = max(
            int(inputs.groups[0].blocks_RN.max()) + 1 for inputs, _ in self.inputs.values()
        )
        self.kv: list[LayerCache] = [
            tuple(
                torch.zeros(blocks, BLOCK, tensor.heads, tensor.width)
                for tensor in layer.mixer.cache(1)
            )
            for layer in spec.layers
        ]
        self.policies = {mode: OverlapPolicy(mode) for mode in MODES}
        self.num_steps = 0

    def run(self, order: Order) -> list[Step]:
        inputs, counts = self.inputs[order.phase]
        self.mesh.seal = self.seal if order.encrypted else None
        with torch.inference_mode():
            return [
                self._step(inputs, counts, self.policies[order.mode], order.trace)
                for _ in range(order.steps)
            ]

    def _step(self, inputs: StepInputs, counts: I32, policy: OverlapPolicy, trace: bool) -> Step:
        rows = np.arange(len(counts), dtype=np.int32)
        plan = StepPlan(
            self.num_steps, rows, inputs.starts_R, counts, np.ones(len(counts), np.bool_), ()
        )
        decision = dataclasses.replace(
            self._agree([plan.num_tokens, best_split(counts), policy.ubatches_ok(plan)]),
            trace=trace,
        )
        self.num_steps += 1
        began_ns = time.perf_counter_ns()
        self.ubatches.forward(self.model, inputs, best_split(counts), decision, self.kv)
        took_us = (time.perf_counter_ns() - began_ns) // 1000
        meter = self.ubatches.take_meter()
        nothing = np.zeros(0, np.int32)
        result = StepResult(
            plan.step,
            nothing,
            device_us=took_us,
            comm_us=meter.comm_us,
            exposed_comm_us=meter.exposed_us,
        )
        policy.note(dataclasses.replace(plan, decision=decision), result)
        return Step(took_us, decision.ubatches, meter.comm_us, meter.exposed_us, meter.events)

    def _agree(self, own: list[int]) -> StepDecision:
        votes = [
            Vote(
                self.num_steps,
                1,
                has_work=True,
                tokens=tokens,
                split_at=split_at,
                ubatches_ok=bool(ubatches_ok),
            )
            for tokens, split_at, ubatches_ok in (own, self._swap(own))
        ]
        decision = decide(votes).step_decision
        assert decision is not None
        return decision

    def _swap(self, own: list[int]) -> list[int]:
        self.peer.write(json.dumps(own).encode() + b"\n")
        self.peer.flush()
        line = self.peer.readline()
        if not line:
            raise SystemExit(f"rank {1 - self.setup.rank} is gone")
        answer: list[int] = json.loads(line)
        return answer


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank(msgspec.json.decode(sys.argv[1], type=Setup))
    for order in _orders():
        print(msgspec.json.encode(rank.run(order)).decode(), flush=True)


def _orders() -> Iterator[Order]:
    for line in sys.stdin:
        yield msgspec.json.decode(line, type=Order)


def _connect(rank: int) -> socket.socket:
    if rank == 0:
        with socket.create_server((ADDRESSES[0], 7000)) as server:
            made, _ = server.accept()
    else:
        made = _patiently((ADDRESSES[0], 7000))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _patiently(address: tuple[str, int]) -> socket.socket:
    for _ in range(600):
        with contextlib.suppress(OSError):
            return socket.create_connection(address)
        time.sleep(0.1)
    raise SystemExit("rank 0 did not come up")


def _build(setup: Setup) -> tuple[Decoder, Mesh]:
    """Return this rank's model with random weights, and the mesh that joins both ranks."""
    spec = setup.sizes.spec()
    world = World(setup.rank, 2)
    placement = Placement.initial(spec.num_layers, spec.num_experts, 2)
    plan = load_plan(spec, (), world, placement)
    generator = torch.Generator().manual_seed(7)
    params = {}
    for param in plan.params:
        params[param.name] = torch.randn(param.shape, generator=generator) * spec.hidden_size**-0.5
        if param.name.endswith("norm"):
            params[param.name] = torch.ones(param.shape)
    facts = BackendFacts(
        hidden_size=spec.hidden_size,
        dtype=DTYPE,
        top_k=spec.experts_per_token,
        max_tokens=setup.tokens,
        num_ranks=2,
        experts_per_rank=placement.experts_per_rank,
        wire=wire_of("auto", DTYPE),
        encrypt_rows=True,
    )
    backend = TorchAll2All(facts)
    model = build_decoder(
        spec,
        params,
        pick_ops("cpu", DTYPE),
        world=world,
        placement=placement,
        backends=[backend],
        ubatches=2,
        max_tokens=setup.tokens,
    )
    store = f"{ADDRESSES[0]}:7001"
    members = Members(
        epoch=1,
        rank=setup.rank,
        tp_size=1,
        host_of=("x", "y"),
        directory="",
        store=store,
        token="bench",
    )
    backend.join(members, placement.experts_per_rank, 2)
    return model, backend.mesh


def step_inputs(counts: I32, start: int) -> StepInputs:
    """Return a step with counts[i] tokens of request i, after `start` cached tokens of each."""
    starts = np.full(len(counts), start, np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = starts[rows] + np.arange(len(rows)) - offsets[rows]
    blocks = -(-int(counts.max() + start) // BLOCK)
    tables = 1 + np.arange(len(counts) * blocks).reshape(-1, blocks)
    cells = tables[rows, positions // BLOCK] * BLOCK + positions % BLOCK
    group = GroupInputs(torch.from_numpy(cells), torch.from_numpy(tables), BLOCK, None)
    ids = torch.randint(0, 4096, (len(rows),), generator=torch.Generator().manual_seed(1))
    on_device = torch.from_numpy(starts), torch.from_numpy(offsets)
    return StepInputs(
        ids,
        Positions.of_text(torch.from_numpy(positions)),
        (group,),
        torch.arange(0),
        offsets,
        starts,
        on_device,
    )


if __name__ == "__main__":
    main()
