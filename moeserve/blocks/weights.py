"""Collects the parameters of a model and the checkpoint tensors that fill them, block by block.

A tensor-parallel rank holds output columns only (rows of the weights here), never a part of the
inputs that a sum runs over: its heads, and equal shares of every other product's columns (`share`:
those of the last ranks may be smaller).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from moeserve.comm.world import World, share
from moeserve.loader.load_plan import LoadPlan, Param, Piece

if TYPE_CHECKING:
    from moeserve.moe.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """One spelling of the routed experts, relative to a layer; `{}` stands for the expert's id.

    gate, up, down: one tensor per expert, or, without `{}`, of all experts, [E, I, D] and [E, D,
    I]; no gate where experts have none. gate_up: both of all experts, [E, 2I, D]. Biases have _bias
    behind. transposed: [E, D, 2I] and [E, I, D]. by_turns: gate and up take turns along 2I.
    """

    down: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""
    transposed: bool = False
    by_turns: bool = False

    @property
    def in_one(self) -> bool:
        """Whether a tensor has all experts."""
        return "{}" not in self.down


def per_expert(
    begin: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> ExpertNames:
    """Return the spelling with a tensor for each product of each expert."""
    gate, up, down = (f"{begin}.{{}}.{product}.weight" for product in (gate, up, down))
    return ExpertNames(gate=gate, up=up, down=down)


PER_EXPERT = per_expert("mlp.experts")
SPLIT = ExpertNames(
    gate="mlp.experts.gate_proj", up="mlp.experts.up_proj", down="mlp.experts.down_proj"
)  # of GGUF
FUSED = ExpertNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class MTPNames:
    """The names of a head for multi-token prediction; see models/mtp.py. `{}` stands for the number
    of layers before.

    layer: how the names of its layer's tensors begin. begin: likewise of the others, which are
    norms of embeddings and hidden states, the product that merges both, and the last norm.
    """

    layer: str = "model.layers.{}."
    begin: str = "model.layers.{}."
    embed_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    merge: str = "eh_proj"
    norm: str = "shared_head.norm"


QWEN_MTP = MTPNames(
    "mtp.layers.0.", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's tensors, where they are not Llama's.

    model, head: of the decoder and of the LM head. embed, norm: of the embedding and of the last
    norm. spelled: tensors of a layer by the name that blocks ask for, each with the spellings of
    its checkpoints, the usual one first; a name that is not there is its own spelling. Parts of a
    parameter that are spelled alike lie one below the other in one tensor. experts: likewise.
    boxed: endings of tensors that have one more dimension, of size 1. ignored, foreign: endings,
    and beginnings, of tensors that the model does not need. mtp: of the head for multi-token
    prediction.
    """

    model: str = "model."
    head: str = "lm_head.weight"
    embed: str = "embed_tokens.weight"
    norm: str = "norm.weight"
    spelled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    experts: tuple[ExpertNames, ...] = (PER_EXPERT, FUSED)
    boxed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    foreign: tuple[str, ...] = ()
    mtp: MTPNames = MTPNames()


class WeightPlan:
    """Collects parameters and pieces. Attributes: `width` (of the model), `names`, `present` (the
    checkpoint's tensors), `world`, `placement`, `num_moe` (MoE layers planned so far)."""

    def __init__(
        self,
        width: int,
        names: Names,
        present: Collection[str],
        world: World,
        placement: "Placement",
    ) -> None:
        self.width = width
        self.names = names
        self.present = present
        self.world = world
        self.placement = placement
        self.num_moe = 0
        self.params: list[Param] = []
        self.pieces: list[Piece] = []
        self.elsewhere: set[str] = set()  # tensors that other ranks take

    def spell(self, theirs: str, name: str) -> str:
        """Return the checkpoint's name of a layer's tensor: the first spelling that is present, or
        the usual one.

        A GGUF file's tensors are called what blocks ask for (loader/gguf_config.py).
        """
        spellings = [theirs + spelling for spelling in (*self.names.spelled.get(name, ()), name)]
        return next((found for found in spellings if found in self.present), spellings[0])

    def add(
        self,
        param: str,
        shape: tuple[int, ...],
        source: str,
        *,
        sharded: bool = False,
        fp32: bool = False,
    ) -> None:
        """Add a parameter that is one tensor of the checkpoint. sharded: this rank takes its share
        of the rows.
        """
        self.stack(param, [(source, shape[0], self.rows(shape[0], sharded))], *shape[1:], fp32=fp32)

    def rows(self, total: int, sharded: bool = True) -> slice:
        """Return the rows of a tensor that this rank takes: its share of them, or all."""
        return share(total, self.world.tp_size, self.world.tp_rank) if sharded else slice(0, total)

    def stack(
        self,
        param: str,
        sources: Sequence[tuple[str, int, slice]],
        *tail: int,
        widened: bool = False,
        fp32: bool = False,
    ) -> None:
        """Add a parameter made of several tensors along the first dimension.

        sources: (name, rows, the rows to take) of each tensor. tail: the other sizes. widened,
        fp32: see `Param`.
        """
        one = len(sources) > 1 and len({source for source, _, _ in sources}) == 1
        start = above = 0
        for source, count, rows in sources:
            end = start + rows.stop - rows.start
            total = sum(count for _, count, _ in sources) if one else count
            shape = (total, *tail)
            take = (slice(above + rows.start, above + rows.stop),)
            boxed = source.endswith(self.names.boxed)
            self.pieces.append(
                Piece(
                    source,
                    (1, *shape) if boxed else shape,
                    param,
                    (slice(start, end),),
                    (0, *take) if boxed else take,
                )
            )
            start = end
            above = above + count if one else 0
        self.params.append(Param(param, (start, *tail), widened, fp32))

    def block(self, ours: str, theirs: str, module: str = "") -> "BlockPlan":
        """Return the plan of one block of a layer. module: its name there, in front of all that it
        asks for.
        """
        return BlockPlan(self, ours, theirs, module)

    def extend(self, plan: LoadPlan) -> None:
        """Add the parameters and pieces of a plan."""
        self.params += plan.params
        self.pieces += plan.pieces

    def finish(self, ignored: Collection[str] = ()) -> LoadPlan:
        """Return the load plan. ignored: tensors that may be present beside those of
        `Names.ignored`.
        """
        names = self.names
        unneeded = {
            name
            for name in self.present
            if name.endswith(names.ignored) or name.startswith(names.foreign)
        }
        return LoadPlan(
            tuple(self.params),
            tuple(self.pieces),
            frozenset({*ignored, *unneeded, *self.elsewhere}),
        )


class BlockPlan(NamedTuple):
    """A `WeightPlan` in the names of one block: parameters begin with `ours`, tensors with
    `theirs`, and blocks ask for them as `module` + ..."""

    plan: WeightPlan
    ours: str
    theirs: str
    module: str

    def add(
        self,
        param: str,
        shape: tuple[int, ...],
        name: str,
        *,
        sharded: bool = False,
        fp32: bool = False,
    ) -> None:
        source = self.plan.spell(self.theirs, self.module + name)
        self.plan.add(self.ours + param, shape, source, sharded=sharded, fp32=fp32)

    def stack(
        self, param: str, parts: Iterable[tuple[str, int, slice]], *tail: int, **options: bool
    ) -> None:
        sources = [
            (self.plan.spell(self.theirs, self.module + name), rows, taken)
            for name, rows, taken in parts
        ]
        self.plan.stack(self.ours + param, sources, *tail, **options)

    def share(self, name: str, rows: int) -> tuple[str, int, slice]:
        """Return this rank's share of a tensor's rows, for `stack`."""
        return name, rows, self.plan.rows(rows)
