"""Builds a model's load plan block by block: its parameters, and the checkpoint tensors for them.

Tensor-parallel ranks shard outputs (rows of weights) only, never the inputs over which a product
sums. A rank has its heads, and a share of the outputs of every other product; the shares of the
last ranks may be smaller.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from moeserve.comm.world import World, share
from moeserve.loader.load_plan import Index, LoadPlan, Param, Piece

if TYPE_CHECKING:
    from moeserve.moe.placement.placement import Placement


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the routed experts' tensors in one kind of checkpoint, relative to a layer.

    Names with `{}`, for the expert's id, have a tensor per expert. Other names have one tensor for
    all E experts. The names of biases end with _bias.
    """

    down: str  # [D, I] or [E, D, I]
    gate: str = ""  # [I, D] or [E, I, D]; "": experts without gates, or see gate_up
    up: str = ""  # [I, D] or [E, I, D]
    gate_up: str = ""  # [E, 2I, D]: gate and up in one tensor
    transposed: bool = False  # gate_up is [E, D, 2I], and down [E, I, D]
    by_turns: bool = False  # gate and up are interleaved along 2I
    stacked: bool = False  # gate and up are [E * I, D], and so is down, transposed (DBRX)
    always: "ExpertNames | None" = None  # names of `MoE.num_always` experts, if there are any

    @property
    def in_one(self) -> bool:
        """Whether one tensor has all experts."""
        return "{}" not in self.down


def per_expert(
    begin: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> ExpertNames:
    """Return the names of experts with a tensor per expert and product."""
    gate, up, down = (f"{begin}.{{}}.{product}.weight" for product in (gate, up, down))
    return ExpertNames(gate=gate, up=up, down=down)


PER_EXPERT = per_expert("mlp.experts")
GGUF_EXPERTS = (  # the same for all architectures
    ExpertNames(
        gate="mlp.experts.gate_proj", up="mlp.experts.up_proj", down="mlp.experts.down_proj"
    ),
    ExpertNames(gate_up="mlp.experts.gate_up", down="mlp.experts.down_proj"),
)
FUSED = ExpertNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class MTPNames:
    """The names of an MTP head's tensors (models/mtp.py). `{}`: the number of decoder layers."""

    layer: str = "model.layers.{}."  # prefix of its layer's tensors
    begin: str = "model.layers.{}."  # prefix of the following
    embed_norm: str = "enorm"  # norm of embeddings
    hidden_norm: str = "hnorm"  # norm of hidden states
    merge: str = "eh_proj"  # the product that merges both
    norm: str = "shared_head.norm"  # last norm
    # With several residual streams (models/streams_mtp.py): the products of embeddings and of
    # hidden states, and whether the norm of hidden states is that of each stream
    merge_parts: tuple[str, str] = ("fc_embedding", "fc_hidden")
    per_stream: bool = False


QWEN_MTP = MTPNames(
    layer="mtp.layers.0.",
    begin="mtp.",
    embed_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    merge="fc",
    norm="norm",
)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's tensors; the defaults are Llama's."""

    model: str = "model."  # prefix of the decoder
    layers: str = "layers"  # the list of its layers
    head: str = "lm_head.weight"
    embed: str = "embed_tokens.weight"
    norm: str = "norm.weight"  # the last norm
    # Name that blocks use -> its names in the family's checkpoints, the usual one first. Blocks'
    # names are Llama's; a name that is absent here is used as it is. If parts of a parameter have
    # the same name, one tensor has all of them, stacked.
    spelled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    experts: tuple[ExpertNames, ...] = (PER_EXPERT, FUSED)  # likewise
    # Suffixes of tensors with an additional first dimension, of whose rows the first one is used
    boxed: tuple[str, ...] = ()
    boxed_rows: int = 1
    transposed: tuple[str, ...] = ()  # suffixes of matrices that are stored as [inputs, outputs]
    # Suffixes of tensors that have several parts of a parameter, whose rows are interleaved
    by_turns: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # suffixes of tensors that are not used
    foreign: tuple[str, ...] = ()  # prefixes of tensors that are not used
    mtp: MTPNames = MTPNames()
    others: tuple["Names", ...] = ()  # those of checkpoints in which these are not present

    def of(self, present: Collection[str]) -> "Names":
        """Return the names of a checkpoint. present: the names of its tensors."""
        return next(
            (
                names
                for names in (self, *self.others)
                if names.model + names.embed in present and names.head in present
            ),
            self,
        )


class WeightPlan:
    """Collects the parameters and pieces of a load plan.

    width: the width of the model.
    present: the names of the checkpoint's tensors.
    """

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
        self.num_moe = 0  # MoE layers planned so far
        self.params: list[Param] = []
        self.pieces: list[Piece] = []
        self.on_other_ranks: set[str] = set()  # names of tensors that other ranks load

    def spell(self, tensor_prefix: str, name: str) -> str:
        """Return the checkpoint's name of a layer's tensor: the first that is present, or the usual
        one.

        tensor_prefix: the layer's prefix.
        name: the name that blocks use. GGUF tensors have the same names (loader/gguf_tensors.py).
        """
        candidates = [
            tensor_prefix + spelling for spelling in (*self.names.spelled.get(name, ()), name)
        ]
        return next((name for name in candidates if name in self.present), candidates[0])

    def add(
        self,
        param: str,
        shape: tuple[int, ...],
        source: str,
        *,
        sharded: bool = False,
        fp32: bool = False,
    ) -> None:
        """Add a parameter that is one tensor. sharded: this rank loads its share of the rows."""
        self.stack(param, [(source, shape[0], self.rows(shape[0], sharded))], *shape[1:], fp32=fp32)

    def rows(self, total: int, sharded: bool = True) -> slice:
        """Return the rows of a tensor that this rank loads: its share if sharded, otherwise all."""
        return share(total, self.world.tp_size, self.world.tp_rank) if sharded else slice(0, total)

    def stack(
        self,
        param: str,
        sources: Sequence[tuple[str, int, slice]],
        *tail: int,
        widened: bool = False,
        fp32: bool = False,
    ) -> None:
        """Add a parameter made of several tensors, concatenated along the first dimension.

        sources: (name, number of rows, rows to load) of each tensor. tail: the other dimensions.
        widened, fp32: see `Param`.
        """
        # If all sources have the same name, they are stacked in one tensor.
        is_one_tensor = len(sources) > 1 and len({source for source, _, _ in sources}) == 1
        total = sum(count for _, count, _ in sources)
        parts = []
        offset = 0  # first row of a source in its tensor
        for i, (source, count, rows) in enumerate(sources):
            taken = slice(offset + rows.start, offset + rows.stop)
            if is_one_tensor and source.endswith(self.names.by_turns):
                step = len(sources)
                taken = slice(i + step * rows.start, i + step * rows.stop, step)
            parts.append((source, total if is_one_tensor else count, taken))
            offset = offset + count if is_one_tensor else 0
        self.pick(param, parts, *tail, widened=widened, fp32=fp32)

    def pick(
        self,
        param: str,
        sources: Sequence[tuple[str, int, slice]],
        *tail: int,
        widened: bool = False,
        fp32: bool = False,
        int64: bool = False,
        on_disk: bool = False,
        below: int = 0,
    ) -> None:
        """Add a parameter made of ranges of rows of tensors, in this order.

        sources: (name, number of rows, rows to load) of each tensor. A tensor may be listed
        several times. int64, on_disk, below: see `Param`. The other arguments are those of `stack`.
        """
        start = 0  # first row of a source in the parameter
        for source, total, rows in sources:
            end = start + len(range(total)[rows])
            shape: tuple[int, ...] = (total, *tail)
            take: Index = (rows,)
            if source.endswith(self.names.boxed):
                shape = (self.names.boxed_rows, *shape)
                take = (0, *take)
            transposed = source.endswith(self.names.transposed)
            if transposed:
                shape = (*tail, total)
                take = (slice(None), rows)
            at = (slice(start, end),)
            self.pieces.append(Piece(source, shape, param, at, take, transposed))
            start = end
        self.params.append(Param(param, (start, *tail), widened, fp32, int64, on_disk, below))

    def block(self, param_prefix: str, tensor_prefix: str, module: str = "") -> "BlockPlan":
        """Return a plan for one block of a layer.

        param_prefix: the prefix of the parameters' names.
        tensor_prefix: the prefix of the layer's tensors in the checkpoint.
        module: the prefix of the block's tensors within the layer, such as "self_attn.".
        """
        return BlockPlan(self, param_prefix, tensor_prefix, module)

    def extend(self, plan: LoadPlan) -> None:
        """Add the parameters and pieces of a plan."""
        self.params += plan.params
        self.pieces += plan.pieces

    def finish(self, ignored: Collection[str] = ()) -> LoadPlan:
        """Return the load plan. ignored: names of more tensors that are not used."""
        names = self.names
        unneeded = {
            name
            for name in self.present
            if name.endswith(names.ignored) or name.startswith(names.foreign)
        }
        return LoadPlan(
            tuple(self.params),
            tuple(self.pieces),
            frozenset({*ignored, *unneeded, *self.on_other_ranks}),
        )


class BlockPlan(NamedTuple):
    """A view of a `WeightPlan` in which names are relative to one block; see `WeightPlan.block`."""

    plan: WeightPlan
    param_prefix: str
    tensor_prefix: str
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
        source = self.plan.spell(self.tensor_prefix, self.module + name)
        self.plan.add(self.param_prefix + param, shape, source, sharded=sharded, fp32=fp32)

    def stack(
        self, param: str, parts: Iterable[tuple[str, int, slice]], *tail: int, **options: bool
    ) -> None:
        sources = [
            (self.plan.spell(self.tensor_prefix, self.module + name), rows, taken)
            for name, rows, taken in parts
        ]
        self.plan.stack(self.param_prefix + param, sources, *tail, **options)

    def pick(
        self,
        param: str,
        parts: Iterable[tuple[str, int, slice]],
        *tail: int,
        below: int = 0,
        **options: bool,
    ) -> None:
        sources = [
            (self.plan.spell(self.tensor_prefix, self.module + name), rows, taken)
            for name, rows, taken in parts
        ]
        self.plan.pick(self.param_prefix + param, sources, *tail, below=below, **options)

    def share(self, name: str, rows: int) -> tuple[str, int, slice]:
        """Return this rank's share of a tensor's rows, as a source for `stack`."""
        return name, rows, self.plan.rows(rows)
