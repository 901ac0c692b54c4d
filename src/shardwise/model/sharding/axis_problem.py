"""The sharding problem along one axis: the strategies of each operator and their costs, given the other axes' decisions.

`AxisProblem` says how an operator may be sharded and what it costs without redistributions; `axis_values` says the same of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.errors import LayoutError
from shardwise.model.dims.labels import dims_with_label, expert_weights, label_meanings
from shardwise.model.dims.sequence_dims import reshaped_positions
from shardwise.model.graph import Graph, Operator, Ref, writes_buffer
from shardwise.model.sharding.axis_values import AxisValues, FixedShards, OtherAxes
from shardwise.model.sharding.sharding import Prices, transfer_s
from shardwise.model.work import operator_bytes, operator_flops
from shardwise.ops import Rule, is_random, partial_placements, reads_partial, record_of, windows_of
from shardwise.ops.attention import heads_label, is_fused_attention
from shardwise.ops.experts import EXPERT, num_experts
from shardwise.ops.recurrent import HIDDEN_UNITS, gathered_steps
from shardwise.ops.rule import HALO, KEYS, ORDERED, POSITIONAL, QUERIES
from shardwise.ops.vocabulary import LoweringKind, ViewKind
from shardwise.plan.ir.axis import GATHER, RING, ULYSSES, ULYSSES_RING
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.placement import (
    D,
    Halo,
    P,
    Placement,
    R,
    Shard,
    Strided,
    even_shard_ranges,
    halo_placement,
    is_halo,
    is_shard,
    is_sharded,
)


@dataclass(frozen=True, slots=True)
class OperatorStrategy:
    """One strategy for an operator along an axis: input placements, output placements, and cost without redistributions."""

    label: str
    input_placements: tuple[Placement | None, ...]
    output_placements: tuple[Placement, ...]
    cost_s: float

    @property
    def plan_name(self) -> str:
        """Name of the strategy in a plan: the label, with `+` where partial sums are left."""
        return self.label + "+" * (P in self.output_placements)


class AxisProblem(AxisValues):
    """The problem along one axis of `n` ranks. `sequence` and `samples`: as in `propagate`."""

    def __init__(
        self,
        graph: Graph,
        axis: str,
        n: int,
        prices: Prices,
        fixed_shards: FixedShards,
        other_axes: OtherAxes,
        sequence: bool = False,
        samples: bool = False,
    ):
        super().__init__(graph, axis, n, prices, fixed_shards, other_axes)
        self.labels, self.pinned_placements = fixed_shards.labels, other_axes.pinned_placements
        self.weights = {v.value for v in graph.parameters if len(v.tensor.shape) > 1}
        self.products = {op.name for op in graph.operators if operator_flops(op, graph.tensors) > 0}
        self.sequence, self.samples = sequence, samples
        self.scatters_sums = sequence or samples  # whether partial sums may be reduce-scattered between products
        self.weight_label_meanings = label_meanings(graph, self.rules) if self.cuts_weights else None
        self.experts = (
            {value for value in expert_weights(graph) if (self.planned_dims or {}).get(value) == 0}
            if self.axis_record.shards_experts
            else set()
        )
        self.expert_label_meanings = label_meanings(graph, self.rules) if self.axis_record.shards_experts else {}

    def admits(self, op: Operator, rule: Rule, label: str) -> bool:
        """Return whether the axis is meant for dimensions of this kind."""
        places = dims_with_label(op, rule, label)
        if self.expert_rows and not record_of(op).expert_stage and not self.expert_rows.isdisjoint(places):
            return True
        if self.cuts_positions:
            if self.axis_record.shards_sequences:
                if label == heads_label(rule):
                    return True
                return record_of(op).view.kind != ViewKind.RESHAPE and all(
                    place in self.sequence_dims or place in self.expert_rows for place in places
                )
            return any(self.axis_record.shards & self.image_positions.get(place, frozenset()) for place in places)
        if rule.kernels.get(label) in POSITIONAL:
            return False
        if self.axis_record.shards_channels and self.image_channels.isdisjoint(places):
            return False
        return self.weight_label_meanings is None or self.weight_label_meanings[op.name].admits(label, self.sequence, self.samples)

    def _divides_evenly(self, op: Operator, rule: Rule, label: str) -> bool:
        """Return whether shards of a label are consistent in each dimension that has it: equal, or of as many units of each."""
        if rule.kernels.get(label) == HALO:
            return True
        if (op.name, label) in self.fused_dims.labels:
            return bool(self._run_units(*dims_with_label(op, rule, label)[0])) and not is_random(op)
        all_places = dims_with_label(op, rule, label)
        places = [place for place in all_places if place not in self.expert_rows and not self._stays_replicated(op, *place)]
        if self.axis_record.shards_sequences and len({self.sequence_dims[place] for place in places if place in self.sequence_dims}) > 1:
            return False  # positions in different arrangements
        nested = {dim in self.nested_shards.get(value, ()) for value, dim in places}
        if is_fused_attention(op) and True in nested and (False in nested or places != all_places):
            return False  # nested shards of one operand with all of another
        pieces = [self.shard(*place) for place in places]
        if any(isinstance(piece, Shard) and piece.runs for piece in pieces):
            return not is_random(op) and op.function is None and places == all_places
        if rule.kernels.get(label) in ORDERED and any(isinstance(piece, Strided) for piece in pieces):
            return False
        if any(not self._keeps_groups(*place, rule.num_units[label]) for place in places if label in rule.num_units):
            return False
        if all(isinstance(piece, Strided) for piece in pieces) or not any(isinstance(piece, Shard) and piece.lengths for piece in pieces):
            return True
        units = {self.graph.tensors[value].shape[dim] // self._unit_size(value, dim) for value, dim in places}
        return op.function is None and len(units) == 1  # users' autograd functions are checked on equal shards

    def _stays_replicated(self, op: Operator, value: str, dim: int) -> bool:
        """Return whether an operand has too few entries for all ranks, each of which selects those that its shard of the first operand
        reads."""
        length = self.graph.tensors[value].shape[dim]
        repeats = is_fused_attention(op) and value in op.inputs[1:3]
        return repeats and length < self.n and length < self.graph.tensors[op.inputs[0]].shape[dim]

    def _keeps_groups(self, value: str, dim: int, groups: int) -> bool:
        """Return whether every rank has complete ones of `groups` equal parts of a dimension."""
        length, form = self.graph.tensors[value].shape[dim], self.shard(value, dim)
        return isinstance(form, Shard) and all(form.local_range(length, self.n, i)[1] % (length // groups) == 0 for i in range(self.n))

    def compute_s(self, op: Operator) -> float:
        """Seconds of an unsharded operator, forward and (counted twice) backward; 0 for non-products if a later axis may shard them."""
        if self.has_later_axes and op.name not in self.products:
            return 0.0
        flops, size = operator_flops(op, self.graph.tensors), operator_bytes(op, self.graph.tensors)
        return 3 * self.roofline_s(op, flops, size, self.weight_bytes(op))

    def roofline_s(self, op: Operator, flops: float, size: float, fixed_bytes: float) -> float:
        """Seconds by the roofline model: so many FLOPs, or so many bytes, `fixed` of them independent of the number of samples."""
        value, fixed_bytes = op.outputs[0], min(size, fixed_bytes)
        num_bytes = self.rank_amount(size - fixed_bytes, value) + fixed_bytes / self.fixed_divisor
        return max(self.rank_amount(flops, value) / self.prices.flops_per_s, num_bytes / self.prices.memory_bytes_per_s)

    def weight_bytes(self, op: Operator) -> int:
        """Bytes of the weights that an operator reads, where its other operands follow the samples."""
        if op.outputs[0] not in self.batch_values:
            return 0
        return sum(self.graph.tensors[v].size_bytes for v in dict.fromkeys(op.inputs) if v not in self.batch_values)

    def strategies(self, op: Operator) -> list[OperatorStrategy]:
        rule, seconds = self.rules[op.name], self.compute_s(op)
        expert_strategies = [] if rule is None else self._expert_strategies(op, rule, seconds)
        if expert_strategies and self.axis_record.shards_experts:  # tokens are sent to the experts, weights never to the tokens
            return self._select_planned(op, self.labels.get(op.site), expert_strategies)
        replicated: list[Placement | None] = [R] * len(op.inputs)
        if rule is not None:
            replicated = [None if labels is None else R for labels in rule.inputs]
        options = [OperatorStrategy("", tuple(replicated), (R,) * len(op.outputs), seconds), *expert_strategies]
        planned = self.labels.get(op.site)
        if rule is None or writes_buffer(op, self.state):
            return self._select_planned(op, planned, options)
        for label in rule.labels:
            if (planned is None and not self.admits(op, rule, label)) or self._is_sharded_by_expert(op, rule, label, expert_strategies):
                continue
            for summed in (True, False) if self.scatters_sums or planned is not None else (True,):
                choice = self._strategy_for(op, rule, label, seconds, summed)
                if choice is not None and choice not in options:
                    options += [choice, *self._with_gathered_output(op, choice)]
        if self.axis_record.shards_sequences and record_of(op).view.kind == ViewKind.RESHAPE:
            options += self._reshape_strategies(op, seconds)
        if self.axis_record.shards_sequences and QUERIES in rule.kernels.values():
            options = self._attention_strategies(op, rule, options)
        if any(value in self.pinned_placements for value in op.inputs):
            needed = [self.pinned_placements.get(value) for value in op.inputs]
            options = [
                c for c in options if all(p is None or need in (None, p) for p, need in zip(needed, c.input_placements, strict=True))
            ] or options
        if (self.axis_record.shards_samples or record_of(op).expert_stage) and all(
            self.graph.tensors[v].is_differentiable for v in op.outputs
        ):
            options += [OperatorStrategy("", needs, (P,) * len(op.outputs), seconds) for needs in partial_placements(op, self.grads)]
        return self._select_planned(op, planned, options)

    def _is_sharded_by_expert(self, op: Operator, rule: Rule, label: str, spread: list[OperatorStrategy]) -> bool:
        """Return whether rows are sharded by expert along an axis where `label` would shard them by token: by expert wherever possible,
        since shards do not tell which."""
        stage = record_of(op).expert_stage
        is_border = stage in (LoweringKind.EXPERT_DISPATCH, LoweringKind.EXPERT_COMBINE) and bool(spread)
        return bool(stage) and (label == EXPERT or (is_border and not self.expert_rows.isdisjoint(dims_with_label(op, rule, label))))

    def _with_gathered_output(self, op: Operator, choice: OperatorStrategy) -> list[OperatorStrategy]:
        """Return the variant of a recurrence sharded by hidden units with the gathered output, which every step gathers anyway."""
        if choice.label != HIDDEN_UNITS or not record_of(op).over_steps:
            return []
        return [replace(choice, output_placements=(D if op.outputs[0] in self.grads else R, *choice.output_placements[1:]))]

    def _expert_strategies(self, op: Operator, rule: Rule, seconds: float) -> list[OperatorStrategy]:
        """Return the strategies by expert: of a product of stacked matrices on the label of experts, and of operators on expert rows."""
        stage = record_of(op).expert_stage
        if not stage:
            labels = dict.fromkeys(row[0] for value, row in zip(op.inputs, rule.inputs, strict=True) if value in self.experts and row)
            options = [self._strategy_for(op, rule, label, seconds, True) for label in labels]
            return [choice for choice in options if choice is not None]
        number = num_experts(op, self.graph.tensors)
        sends = self.axis_record.shards_experts  # ranks of an expert axis have different tokens; tensor ranks have the same
        if (
            number < self.n
            or not (sends or self.cuts_weights)
            or op.name in self.other_axes.sent_operators  # tokens are sent to one rank for each expert
            or any((v, 0) in self.replicated_expert_rows for v in (*op.inputs, *op.outputs))
        ):
            return []
        token_values = () if stage == LoweringKind.EXPERT_MATMUL else op.inputs[0 if stage == LoweringKind.EXPERT_DISPATCH else 2 :]
        if not all(self.can_shard(v, 0) for v in op.inputs if v not in token_values or sends):
            return []
        token_placements = {v: D if v in self.grads else R for v in token_values} if not sends else {}
        needs = tuple(token_placements.get(v) or self.shard(v, 0) for v in op.inputs)
        makes = tuple(P if stage == LoweringKind.EXPERT_COMBINE and not sends else self.shard(v, 0) for v in op.outputs)
        return [OperatorStrategy(EXPERT, needs, makes, seconds / self.n)]

    def _reshape_strategies(self, op: Operator, seconds: float) -> list[OperatorStrategy]:
        """Return the strategies of a reshape with sharded positions, possibly merged with samples."""
        options = []
        for dim, target_dim in reshaped_positions(op, self.graph, self.sequence_dims):
            if self.can_shard(op.inputs[0], dim) and self.can_shard(op.outputs[0], target_dim):
                read, target = self.shard(op.inputs[0], dim), self.shard(op.outputs[0], target_dim)
                options.append(
                    OperatorStrategy(f"d{dim}", (read, *(None,) * (len(op.inputs) - 1)), (target,), seconds / target.split_factor(self.n))
                )
        return options

    def _attention_strategies(self, op: Operator, rule: Rule, choices: list[OperatorStrategy]) -> list[OperatorStrategy]:
        """Return the attention strategies of the layout's kind; all of them where there is none."""
        if self.attention == AUTO:
            return choices
        heads = heads_label(rule) or None
        strategies = {ULYSSES: [c for c in choices if c.label == heads], GATHER: [c for c in choices if c.label != heads]}
        if self.attention in (RING, ULYSSES_RING):
            strategies[self.attention] = [ring for c in choices if (ring := self._ring_strategy(op, rule, c)) is not None]
        return strategies[self.attention] or choices

    def _ring_strategy(self, op: Operator, rule: Rule, choice: OperatorStrategy) -> OperatorStrategy | None:
        """Return attention sharded by queries with keys and values sharded too (ring attention); None where they cannot be."""
        if rule.kernels.get(choice.label) != QUERIES:
            return None
        needs = list(choice.input_placements)
        for i in (1, 2):
            value, row = op.inputs[i], rule.inputs[i] or ()
            dim = next((dim for dim, label in enumerate(row) if rule.kernels.get(label) == KEYS), None)
            if dim is None or not self.can_shard(value, dim):
                return None
            needs[i] = self.shard(value, dim)
        return OperatorStrategy(choice.label, tuple(needs), choice.output_placements, choice.cost_s)

    def _select_planned(self, op: Operator, planned_name: str | None, choices: list[OperatorStrategy]) -> list[OperatorStrategy]:
        if planned_name is None:
            return choices
        planned = [choice for choice in choices if choice.plan_name == planned_name]
        if not planned:
            possible = ", ".join(choice.plan_name or "none" for choice in choices)
            raise LayoutError(f"the plan cuts {planned_name!r} of {op.site} over {self.axis}={self.n}, but what can be cut is {possible}")
        return planned

    def is_worthwhile(self, op: Operator, choice: OperatorStrategy, placements: Mapping[str, tuple[Placement, ...]]) -> bool:
        """Return whether a strategy follows from something: an input sharded so already, or (not over data) work that it saves.

        Other sharding of cheap operators is legal, but crowds out the states that matter.
        """
        if P in choice.input_placements:  # a partial sum, with replicated inputs only
            return reads_partial(
                choice.input_placements, [placements.get(value) or self.initial_placements(value) or (R,) for value in op.inputs]
            )
        if not choice.label or op.site in self.labels or self.experts.intersection(op.inputs):
            return True
        if record_of(op).expert_stage == LoweringKind.EXPERT_DISPATCH and choice.label == EXPERT:
            return True
        if self.experts and choice.label in self.expert_label_meanings[op.name].samples:  # experts return the tokens they were sent
            return True
        for value, need in zip(op.inputs, choice.input_placements, strict=True):
            if is_sharded(need):
                have = placements.get(value) or self.initial_placements(value) or ()
                if need in have or (is_halo(need) and self.shard(value, need.dim) in have) or (self.scatters_sums and P in have):
                    return True
                if self.cuts_weights and value in self.weights and not have:
                    return True
                if any((value, form.dim) in self.head_dims for form in have if is_shard(form)):  # from heads to positions
                    return True
        return op.name in self.products if self.cuts_weights else self.axis_record.shards_sequences and self._starts_sharding(op)

    def _starts_sharding(self, op: Operator) -> bool:
        """Return whether sequence sharding may begin at an operator with no sharded input: where there is work to divide, or more is
        computed than is read (masks)."""
        sizes = (sum(self.graph.tensors[v].size for v in values) for values in (dict.fromkeys(op.inputs), op.outputs))
        return op.name in self.products or (bool(op.inputs) and next(sizes) < next(sizes))

    def _strategy_for(self, op: Operator, rule: Rule, label: str, seconds: float, adds_bias_after_sum: bool) -> OperatorStrategy | None:
        """Return the strategy that shards `label`. `summed`: a product with bias all-reduces first, and adds the bias once; else each rank
        adds its share of the bias."""
        kernel, record = rule.kernels.get(label), record_of(op)
        if (op.name, label) in self.other_axes.kernel_labels or not self._divides_evenly(op, rule, label):
            return None
        makes = self._output_placements(op, rule, label)
        if makes is None:
            return None
        seconds /= self._work_split(op, rule, label)
        contracted = any(form is P for form in makes) and kernel is None
        bias = (
            op.args[record.product.bias] if contracted and record.product.bias is not None and len(op.args) > record.product.bias else None
        )
        added = bias.value if isinstance(bias, Ref) and adds_bias_after_sum else None
        if added is not None:
            makes = (R,) * len(makes)  # the kernel reduces before it adds the bias
            seconds += self._all_reduce_s(self._size_bytes(op.outputs[0]))
        needs = self._input_placements(op, rule, label, added)
        if needs is None or (record.statistics.positions and not self._statistics_stay(op, needs)):
            return None
        if label == HIDDEN_UNITS and record.over_steps:
            seconds += self._recurrent_gather_s(op)
        if kernel == "extreme":
            seconds += self._all_reduce_s(self._size_bytes(op.outputs[0]))
        if kernel == "statistics":
            seconds += 2 * self._all_reduce_s(16.0 * self.graph.tensors[op.inputs[0]].shape[1])
        return OperatorStrategy(label, needs, makes, seconds)

    def _work_split(self, op: Operator, rule: Rule, label: str) -> float:
        """Return an operator's work over that of the rank with most of it."""
        value, dim = dims_with_label(op, rule, label)[-1]  # the output, of sliding windows
        return self.shard(value, dim).split_factor(self.n)

    def _recurrent_gather_s(self, op: Operator) -> float:
        """Seconds in which a recurrence gathers its hidden state in every step, and reduce-scatters its gradient."""
        steps, state = gathered_steps(op, self.graph.tensors)
        size, unit_shard = self.rank_amount(state, op.outputs[0]), Shard(0)
        gather_s = transfer_s(unit_shard, R, size, self.n, self.prices)
        return steps * (gather_s + (transfer_s(P, unit_shard, size, self.n, self.prices) if op.outputs[0] in self.grads else 0.0))

    def _all_reduce_s(self, size_bytes: float) -> float:
        """Seconds of an all-reduce over the axis inside an operator's kernel."""
        return transfer_s(P, R, size_bytes, self.n, self.prices)

    def _output_placements(self, op: Operator, rule: Rule, label: str) -> tuple[Placement, ...] | None:
        """Return the output placements with `label` sharded; None where it cannot be."""
        kernel, record = rule.kernels.get(label), record_of(op)
        if kernel == KEYS:  # attention to some of the keys is no partial sum
            return None
        makes: list[Placement] = []
        for value, labels in zip(op.outputs, rule.outputs, strict=True):
            if label in labels:
                dim = labels.index(label)
                if not self.can_shard(value, dim) or value in self.other_axes.sliced_values:
                    return None
                makes.append(self.shard(value, dim))
            elif kernel == "vocabulary":
                makes.append(P if record.product.is_lookup else R)
            elif kernel in ("extreme", "apart"):
                makes.append(R)
            elif kernel in ("average", "statistics", "summands") or record.reduction.is_sum:
                makes.append(P)
            else:
                return None
        return tuple(makes)

    def _input_placements(self, op: Operator, rule: Rule, label: str, added_bias: str | None) -> tuple[Placement | None, ...] | None:
        """Return the input placements; None where an input cannot be read so. `added`: the bias that is added once, after the reduction."""
        needs: list[Placement | None] = []
        for value, row in zip(op.inputs, rule.inputs, strict=True):
            if row is None:
                needs.append(None)
            elif label in row:
                dim = row.index(label)
                if self._stays_replicated(op, value, dim):
                    needs.append(D if value in self.grads else R)
                    continue
                read = self._halo_placement(op, value, dim, label) if rule.kernels.get(label) == HALO else self.shard(value, dim)
                if read is None or not self.can_shard(value, dim):
                    return None
                needs.append(read)
            elif value == added_bias:
                needs.append(R)
            else:
                needs.append(D if value in self.grads else R)
        return tuple(needs)

    def _statistics_stay(self, op: Operator, needs: tuple[Placement | None, ...]) -> bool:
        """Return whether running statistics are stored as needed: they are written in place, so they cannot be redistributed first."""
        if self.planned_dims is None:
            return True
        statistics = [v for v in op.inputs if v in self.state and v not in self.grads]
        stored = {v: R if (dim := self.planned_dims.get(v)) is None else self.shard(v, dim) for v in statistics}
        return all(need == stored.get(value, need) for value, need in zip(op.inputs, needs, strict=True))

    def _halo_placement(self, op: Operator, value: str, dim: int, label: str) -> Placement | None:
        """Return the input range placement of ranks for their output shards of sliding windows; None where a range is empty."""
        if (rule := self.rules[op.name]) is None:
            return None
        written = next((value, row.index(label)) for value, row in zip(op.outputs, rule.outputs, strict=True) if label in row)
        length, window = self.graph.tensors[value].shape[dim], windows_of(op, self.graph.tensors)[label]
        ranges = even_shard_ranges(self.graph.tensors[written[0]].shape[written[1]], self.n)
        read = halo_placement(dim, length, [window.input_range(start, stop, length) for start, stop in ranges])
        if isinstance(self.shard(value, dim), Strided) or isinstance(self.shard(*written), Strided):  # such shards have no neighbors
            return None
        empty = isinstance(read, Halo) and any(start == stop for start, stop in read.windows)
        return None if empty else read
