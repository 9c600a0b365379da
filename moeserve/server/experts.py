"""The answer of GET /v1/experts: placement and load of experts, and the state of the engines.

Suffixes of arrays: L layers, E experts, R ranks, S slots of all ranks.
"""

import time

import msgspec
import numpy as np

from moeserve import protocol
from moeserve.cluster.view import EngineView, ExpertsView, FleetView
from moeserve.errors import NotFound
from moeserve.frontend.front_end import FrontEnd
from moeserve.frontend.stats import EngineStats
from moeserve.moe.placement.placement import Placement
from moeserve.moe.placement.solve import balance, rank_loads


def expert_status(front: FrontEnd) -> protocol.ExpertStatus:
    """Return the placement and the load of the experts. Raise NotFound for a dense model."""
    view = front.monitor.view(front.state, front.ready)
    if view.experts is None:
        raise NotFound("there are no experts to watch: the model is dense; see /metrics")
    shown = view.experts
    placement = Placement.from_table(shown.placement)
    shape = placement.num_layers, placement.num_experts
    total_LE = np.frombuffer(shown.counts, "<i8").reshape(shape)
    recent_LE = np.frombuffer(shown.recent, "<f8").reshape(shape)
    loads_LR = rank_loads(recent_LE, placement)
    ranks_L = balance(loads_LR)
    experts_L = balance(recent_LE)
    return protocol.ExpertStatus(
        created=time.time(),
        ep_sharded=view.is_one_group,
        dealt_out=view.is_one_group,
        dp=view.dp,
        tp=view.tp,
        epoch=view.epoch,
        complete=view.complete,
        waiting=view.waiting,
        num_layers=shape[0],
        num_experts=shape[1],
        engines=[_engine(engine, front.stats.engines[engine.rank]) for engine in view.engines],
        machines=view.machines,
        ranks=_ranks(view, placement, loads_LR.sum(0)),
        balance=protocol.ExpertBalance(
            ranks=round(float(ranks_L.mean()), 4),
            experts=round(float(experts_L.mean()), 4),
            ranks_by_layer=ranks_L.round(4).tolist(),
            experts_by_layer=experts_L.round(4).tolist(),
        ),
        load=protocol.ExpertLoads(total=total_LE.tolist(), recent=recent_LE.round(1).tolist()),
        placement=protocol.ExpertPlacement(
            version=placement.version,
            experts_per_rank=placement.experts_per_rank,
            slots_per_rank=placement.experts_per_rank,
            experts=placement.experts_LS.tolist(),
        ),
        rebalancing=_rebalancing(front, shown),
    )


def _engine(engine: EngineView, stats: EngineStats) -> protocol.ExpertEngine:
    last = stats.last
    return protocol.ExpertEngine(
        engine=engine.rank,
        host=engine.host,
        pid=engine.pid,
        state=engine.state,
        epoch=engine.epoch,
        restarts=engine.restarts,
        requests=engine.num_requests,
        running=last.num_running if last else 0,
        waiting=last.num_waiting if last else 0,
        steps=stats.steps,
        step_s=last.device_us / 1e6 if last else 0.0,
        mean_step_s=stats.mean_step_s,
        vote_s=last.vote_us / 1e6 if last else 0.0,
        ubatches=last.ubatches if last else 1,
        lanes=last.ubatches if last else 1,
        comm_s=stats.comm_s,
        exposed_comm_s=stats.exposed_comm_s,
        overlap_efficiency=stats.overlap_efficiency,
    )


def _ranks(view: FleetView, placement: Placement, loads_R: np.ndarray) -> list[protocol.ExpertRank]:
    alone = view.dp * view.tp == 1
    counted = loads_R.sum() > 0 and (view.is_one_group or alone)
    return [
        protocol.ExpertRank(
            rank=rank,
            engine=view.engines[rank // view.tp].rank,
            tp_rank=rank % view.tp,
            slots=placement.experts_per_rank,
            share=round(float(loads_R[rank] / loads_R.sum()), 4)
            if counted and rank < len(loads_R)
            else None,
        )
        for rank in range(view.dp * view.tp)
    ]


def _rebalancing(front: FrontEnd, shown: ExpertsView) -> protocol.ExpertRebalancing:
    fleet = front.fleet
    now_s = time.monotonic()
    decisions = []
    for decision in reversed(shown.decisions):
        attempt = msgspec.convert(decision, protocol.RebalanceAttempt, from_attributes=True)
        attempt.age_s = now_s - decision.at_s
        decisions.append(attempt)
    return protocol.ExpertRebalancing(
        mode=fleet.config.parallel.rebalance
        if fleet is not None and fleet.experts is not None
        else "off",
        why=shown.why,
        moved_bytes=shown.moved_bytes,
        placed=shown.num_placed,
        given_up=shown.num_given_up,
        decisions=decisions,
    )
