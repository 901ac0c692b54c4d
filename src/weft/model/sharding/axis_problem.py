"""The sharding problem along one axis: the strategies of each operator and their costs, given the other axes' decisions.

`AxisProblem` says how an operator may be sharded and what it costs without redistributions; `axis_values` says the same of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.errors import LayoutError
from weft.model.dims.labels import expert_weights, meanings, places_of
from weft.model.dims.sequences import reshapes
from weft.model.graph import Graph, Operator, Ref, writes_buffer
from weft.model.sharding.axis_values import AxisValues, Given, Others
from weft.model.sharding.sharding import Prices, transfer_s
from weft.model.work import operator_bytes, operator_flops
from weft.ops import Rule, draws, record_of, windows_of
from weft.ops.attention import heads_of
from weft.ops.experts import EXPERT, num_experts
from weft.ops.linear import passes, passing
from weft.ops.recurrent import UNITS, gathered_steps
from weft.ops.rule import HALO, KEYS, ORDERED, POSITIONAL, QUERIES
from weft.plan.axis import BOTH, GATHER, RING, ULYSSES
from weft.plan.choice import AUTO
from weft.plan.placement import D, Halo, P, Placement, R, Shard, Strided, halo, is_cut, is_halo, is_shard, pieces


@dataclass(frozen=True, slots=True)
class Choice:
    """One strategy for an operator along an axis: input placements, output placements, and cost without redistributions."""

    label: str
    needs: tuple[Placement | None, ...]
    makes: tuple[Placement, ...]
    cost_s: float

    @property
    def word(self) -> str:
        """Name of the strategy in a plan: the label, with `+` where partial sums are left."""
        return self.label + "+" * (P in self.makes)


class AxisProblem(AxisValues):
    """The problem along one axis of `n` ranks. `sequence` and `samples`: as in `propagate`."""

    def __init__(
        self, graph: Graph, axis: str, n: int, prices: Prices, fixed: Given, others: Others, sequence: bool = False, samples: bool = False
    ):
        super().__init__(graph, axis, n, prices, fixed, others)
        self.labels, self.pinned = fixed.labels, others.pinned
        self.weights = {v.value for v in graph.parameters if len(v.tensor.shape) > 1}
        self.heavy = {op.name for op in graph.operators if operator_flops(op, graph.tensors) > 0}
        self.sequence, self.samples = sequence, samples
        self.spreads = sequence or samples  # whether partial sums may be reduce-scattered between products
        self.meanings = meanings(graph, self.rules) if self.cuts_weights else None
        self.experts = {value for value in expert_weights(graph) if (self.fixed or {}).get(value) == 0} if self.row.cuts_experts else set()
        self.samples_of = meanings(graph, self.rules) if self.row.cuts_experts else {}

    def admits(self, op: Operator, rule: Rule, label: str) -> bool:
        """Return whether the axis is meant for dimensions of this kind."""
        places = places_of(op, rule, label)
        if self.ragged and not record_of(op).ragged and not self.ragged.isdisjoint(places):
            return True
        if self.cuts_positions:
            if self.row.cuts_sequences:
                if label == heads_of(rule):
                    return True
                return record_of(op).moves != "reshape" and all(place in self.sequences or place in self.ragged for place in places)
            return any(self.row.cuts & self.positions.get(place, frozenset()) for place in places)
        if rule.kernels.get(label) in POSITIONAL:
            return False
        if self.row.cuts_channels and self.channels.isdisjoint(places):
            return False
        return self.meanings is None or self.meanings[op.name].admits(label, self.sequence, self.samples)

    def _divides(self, op: Operator, rule: Rule, label: str) -> bool:
        """Return whether shards of a label are consistent in each dimension that has it: equal, or of as many units of each."""
        if rule.kernels.get(label) == HALO:
            return True
        if (op.name, label) in self.fused.labels:
            return bool(self._runs(*places_of(op, rule, label)[0])) and not draws(op)
        all_places = places_of(op, rule, label)
        places = [place for place in all_places if place not in self.ragged and not self._stays_replicated(op, *place)]
        if self.row.cuts_sequences and len({self.sequences[place] for place in places if place in self.sequences}) > 1:
            return False  # positions in different arrangements
        nested = {dim in self.inside.get(value, ()) for value, dim in places}
        if record_of(op).repeats and True in nested and (False in nested or places != all_places):
            return False  # nested shards of one operand with all of another
        pieces = [self.shard(*place) for place in places]
        if any(isinstance(piece, Shard) and piece.runs for piece in pieces):
            return not draws(op) and op.function is None and places == all_places
        if rule.kernels.get(label) in ORDERED and any(isinstance(piece, Strided) for piece in pieces):
            return False
        if any(not self._keeps_groups(*place, rule.units[label]) for place in places if label in rule.units):
            return False
        if all(isinstance(piece, Strided) for piece in pieces) or not any(isinstance(piece, Shard) and piece.lengths for piece in pieces):
            return True
        units = {self.graph.tensors[value].shape[dim] // self._unit(value, dim) for value, dim in places}
        return op.function is None and len(units) == 1  # users' autograd functions are checked on equal shards

    def _stays_replicated(self, op: Operator, value: str, dim: int) -> bool:
        """Return whether an operand has too few entries for all ranks, each of which selects those that its shard of the first operand
        reads."""
        length = self.graph.tensors[value].shape[dim]
        repeats = record_of(op).repeats and value in op.inputs[1:3]
        return repeats and length < self.n and length < self.graph.tensors[op.inputs[0]].shape[dim]

    def _keeps_groups(self, value: str, dim: int, groups: int) -> bool:
        """Return whether every rank has complete ones of `groups` equal parts of a dimension."""
        length, form = self.graph.tensors[value].shape[dim], self.shard(value, dim)
        return isinstance(form, Shard) and all(form.part(length, self.n, i)[1] % (length // groups) == 0 for i in range(self.n))

    def compute_s(self, op: Operator) -> float:
        """Seconds of an unsharded operator, forward and (counted twice) backward; 0 for non-products if a later axis may shard them."""
        if self.more and op.name not in self.heavy:
            return 0.0
        flops, size = operator_flops(op, self.graph.tensors), operator_bytes(op, self.graph.tensors)
        return 3 * self.longer_s(op, flops, size, self.fixed_bytes(op))

    def longer_s(self, op: Operator, flops: float, size: float, fixed: float) -> float:
        """Seconds by the roofline model: so many FLOPs, or so many bytes, `fixed` of them independent of the number of samples."""
        value, fixed = op.outputs[0], min(size, fixed)
        num_bytes = self.share(size - fixed, value) + fixed / self.divide_fixed
        return max(self.share(flops, value) / self.prices.flops_per_s, num_bytes / self.prices.memory_bytes_per_s)

    def fixed_bytes(self, op: Operator) -> int:
        """Bytes of the weights that an operator reads, where its other operands follow the samples."""
        if op.outputs[0] not in self.follows:
            return 0
        return sum(self.graph.tensors[v].size_bytes for v in dict.fromkeys(op.inputs) if v not in self.follows)

    def choices(self, op: Operator) -> list[Choice]:
        rule, seconds = self.rules[op.name], self.compute_s(op)
        expert_strategies = [] if rule is None else self._spread(op, rule, seconds)
        if expert_strategies and self.row.cuts_experts:  # tokens are sent to the experts, weights never to the tokens
            return self._said(op, self.labels.get(op.site), expert_strategies)
        replicated: list[Placement | None] = [R] * len(op.inputs)
        if rule is not None:
            replicated = [None if labels is None else R for labels in rule.inputs]
        options = [Choice("", tuple(replicated), (R,) * len(op.outputs), seconds), *expert_strategies]
        planned = self.labels.get(op.site)
        if rule is None or writes_buffer(op, self.placed):
            return self._said(op, planned, options)
        for label in rule.labels:
            if (planned is None and not self.admits(op, rule, label)) or self._spreads_rows(op, rule, label, expert_strategies):
                continue
            for summed in (True, False) if self.spreads or planned is not None else (True,):
                choice = self._cut(op, rule, label, seconds, summed)
                if choice is not None and choice not in options:
                    options += [choice, *self._handing_on(op, choice)]
        if self.row.cuts_sequences and record_of(op).moves == "reshape":
            options += self._reshaped(op, seconds)
        if self.row.cuts_sequences and QUERIES in rule.kernels.values():
            options = self._attending(op, rule, options)
        if any(value in self.pinned for value in op.inputs):
            needed = [self.pinned.get(value) for value in op.inputs]
            options = [
                c for c in options if all(p is None or need in (None, p) for p, need in zip(needed, c.needs, strict=True))
            ] or options
        if (self.row.cuts_samples or record_of(op).ragged) and all(self.graph.tensors[v].can_learn for v in op.outputs):
            options += [Choice("", needs, (P,) * len(op.outputs), seconds) for needs in passing(op, self.grads)]
        return self._said(op, planned, options)

    def _spreads_rows(self, op: Operator, rule: Rule, label: str, spread: list[Choice]) -> bool:
        """Return whether rows are sharded by expert along an axis where `label` would shard them by token: by expert wherever possible,
        since shards do not tell which."""
        expert_rows = record_of(op).ragged
        is_border = expert_rows in ("begins", "ends") and bool(spread)
        return bool(expert_rows) and (label == EXPERT or (is_border and not self.ragged.isdisjoint(places_of(op, rule, label))))

    def _handing_on(self, op: Operator, choice: Choice) -> list[Choice]:
        """Return the variant of a recurrence sharded by hidden units with the gathered output, which every step gathers anyway."""
        if choice.label != UNITS or not record_of(op).over_steps:
            return []
        return [replace(choice, makes=(D if op.outputs[0] in self.grads else R, *choice.makes[1:]))]

    def _spread(self, op: Operator, rule: Rule, seconds: float) -> list[Choice]:
        """Return the strategies by expert: of a product of stacked matrices on the label of experts, and of operators on expert rows."""
        expert_rows = record_of(op).ragged
        if not expert_rows:
            labels = dict.fromkeys(row[0] for value, row in zip(op.inputs, rule.inputs, strict=True) if value in self.experts and row)
            options = [self._cut(op, rule, label, seconds, True) for label in labels]
            return [choice for choice in options if choice is not None]
        number = num_experts(op, self.graph.tensors)
        sends = self.row.cuts_experts  # ranks of an expert axis have different tokens; tensor ranks have the same
        if number < self.n or not (sends or self.cuts_weights) or any((v, 0) in self.ordered_rows for v in (*op.inputs, *op.outputs)):
            return []
        token_values = () if expert_rows == "goes on" else op.inputs[0 if expert_rows == "begins" else 2 :]
        if not all(self.cuttable(v, 0) for v in op.inputs if v not in token_values or sends):
            return []
        token_placements = {v: D if v in self.grads else R for v in token_values} if not sends else {}
        needs = tuple(token_placements.get(v) or self.shard(v, 0) for v in op.inputs)
        makes = tuple(P if expert_rows == "ends" and not sends else self.shard(v, 0) for v in op.outputs)
        return [Choice(EXPERT, needs, makes, seconds / self.n)]

    def _reshaped(self, op: Operator, seconds: float) -> list[Choice]:
        """Return the strategies of a reshape with sharded positions, possibly merged with samples."""
        options = []
        for dim, target_dim in reshapes(op, self.graph, self.sequences):
            if self.cuttable(op.inputs[0], dim) and self.cuttable(op.outputs[0], target_dim):
                read, target = self.shard(op.inputs[0], dim), self.shard(op.outputs[0], target_dim)
                options.append(Choice(f"d{dim}", (read, *(None,) * (len(op.inputs) - 1)), (target,), seconds / target.ways(self.n)))
        return options

    def _attending(self, op: Operator, rule: Rule, choices: list[Choice]) -> list[Choice]:
        """Return the attention strategies of the layout's kind; all of them where there is none."""
        if self.attention == AUTO:
            return choices
        heads = heads_of(rule) or None
        strategies = {ULYSSES: [c for c in choices if c.label == heads], GATHER: [c for c in choices if c.label != heads]}
        if self.attention in (RING, BOTH):
            strategies[self.attention] = [ring for c in choices if (ring := self._passing_round(op, rule, c)) is not None]
        return strategies[self.attention] or choices

    def _passing_round(self, op: Operator, rule: Rule, choice: Choice) -> Choice | None:
        """Return attention sharded by queries with keys and values sharded too (ring attention); None where they cannot be."""
        if rule.kernels.get(choice.label) != QUERIES:
            return None
        needs = list(choice.needs)
        for i in (1, 2):
            value, row = op.inputs[i], rule.inputs[i] or ()
            dim = next((dim for dim, label in enumerate(row) if rule.kernels.get(label) == KEYS), None)
            if dim is None or not self.cuttable(value, dim):
                return None
            needs[i] = self.shard(value, dim)
        return Choice(choice.label, tuple(needs), choice.makes, choice.cost_s)

    def _said(self, op: Operator, said: str | None, choices: list[Choice]) -> list[Choice]:
        if said is None:
            return choices
        planned = [choice for choice in choices if choice.word == said]
        if not planned:
            possible = ", ".join(choice.word or "none" for choice in choices)
            raise LayoutError(f"the plan cuts {said!r} of {op.site} over {self.axis}={self.n}, but what can be cut is {possible}")
        return planned

    def worth(self, op: Operator, choice: Choice, held: Mapping[str, tuple[Placement, ...]]) -> bool:
        """Return whether a strategy follows from something: an input sharded so already, or (not over data) work that it saves.

        Other sharding of cheap operators is legal, but crowds out the states that matter.
        """
        if P in choice.needs:  # a partial sum, with replicated inputs only
            return passes(choice.needs, [held.get(value) or self.start(value) or (R,) for value in op.inputs])
        if not choice.label or op.site in self.labels or self.experts.intersection(op.inputs):
            return True
        if record_of(op).ragged == "begins" and choice.label == EXPERT:
            return True
        if self.experts and choice.label in self.samples_of[op.name].samples:  # experts return the tokens they were sent
            return True
        for value, need in zip(op.inputs, choice.needs, strict=True):
            if is_cut(need):
                have = held.get(value) or self.start(value) or ()
                if need in have or (is_halo(need) and self.shard(value, need.dim) in have) or (self.spreads and P in have):
                    return True
                if self.cuts_weights and value in self.weights and not have:
                    return True
                if any((value, form.dim) in self.heads for form in have if is_shard(form)):  # from heads to positions
                    return True
        return op.name in self.heavy if self.cuts_weights else self.row.cuts_sequences and self._begins(op)

    def _begins(self, op: Operator) -> bool:
        """Return whether sequence sharding may begin at an operator with no sharded input: where there is work to divide, or more is
        computed than is read (masks)."""
        sizes = (sum(self.graph.tensors[v].size for v in values) for values in (dict.fromkeys(op.inputs), op.outputs))
        return op.name in self.heavy or (bool(op.inputs) and next(sizes) < next(sizes))

    def _cut(self, op: Operator, rule: Rule, label: str, seconds: float, summed: bool) -> Choice | None:
        """Return the strategy that shards `label`. `summed`: a product with bias all-reduces first, and adds the bias once; else each rank
        adds its share of the bias."""
        kernel, record = rule.kernels.get(label), record_of(op)
        if (op.name, label) in self.others.kernels or not self._divides(op, rule, label):
            return None
        makes = self._makes(op, rule, label)
        if makes is None:
            return None
        seconds /= self._ways(op, rule, label)
        contracted = any(form is P for form in makes) and kernel is None
        bias = op.args[record.bias] if contracted and record.bias is not None and len(op.args) > record.bias else None
        added = bias.value if isinstance(bias, Ref) and summed else None
        if added is not None:
            makes = (R,) * len(makes)  # the kernel reduces before it adds the bias
            seconds += self._summed_s(self._bytes(op.outputs[0]))
        needs = self._needs(op, rule, label, added)
        if needs is None or (record.statistics and not self._lie(op, needs)):
            return None
        if label == UNITS and record.over_steps:
            seconds += self._gathered_s(op)
        if kernel == "extreme":
            seconds += self._summed_s(self._bytes(op.outputs[0]))
        if kernel == "statistics":
            seconds += 2 * self._summed_s(16.0 * self.graph.tensors[op.inputs[0]].shape[1])
        return Choice(label, needs, makes, seconds)

    def _ways(self, op: Operator, rule: Rule, label: str) -> float:
        """Return an operator's work over that of the rank with most of it."""
        value, dim = places_of(op, rule, label)[-1]  # the output, of sliding windows
        return self.shard(value, dim).ways(self.n)

    def _gathered_s(self, op: Operator) -> float:
        """Seconds in which a recurrence gathers its hidden state in every step, and reduce-scatters its gradient."""
        steps, state = gathered_steps(op, self.graph.tensors)
        size, unit_shard = self.share(state, op.outputs[0]), Shard(0)
        gather_s = transfer_s(unit_shard, R, size, self.n, self.prices)
        return steps * (gather_s + (transfer_s(P, unit_shard, size, self.n, self.prices) if op.outputs[0] in self.grads else 0.0))

    def _summed_s(self, size_bytes: float) -> float:
        """Seconds of an all-reduce over the axis inside an operator's kernel."""
        return transfer_s(P, R, size_bytes, self.n, self.prices)

    def _makes(self, op: Operator, rule: Rule, label: str) -> tuple[Placement, ...] | None:
        """Return the output placements with `label` sharded; None where it cannot be."""
        kernel, record = rule.kernels.get(label), record_of(op)
        if kernel == KEYS:  # attention to some of the keys is no partial sum
            return None
        makes: list[Placement] = []
        for value, labels in zip(op.outputs, rule.outputs, strict=True):
            if label in labels:
                dim = labels.index(label)
                if not self.cuttable(value, dim) or value in self.others.sliced:
                    return None
                makes.append(self.shard(value, dim))
            elif kernel == "vocabulary":
                makes.append(P if record.looks_up else R)
            elif kernel in ("extreme", "apart"):
                makes.append(R)
            elif kernel in ("average", "statistics", "summands") or record.contracts:
                makes.append(P)
            else:
                return None
        return tuple(makes)

    def _needs(self, op: Operator, rule: Rule, label: str, added: str | None) -> tuple[Placement | None, ...] | None:
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
                read = self._read(op, value, dim, label) if rule.kernels.get(label) == HALO else self.shard(value, dim)
                if read is None or not self.cuttable(value, dim):
                    return None
                needs.append(read)
            elif value == added:
                needs.append(R)
            else:
                needs.append(D if value in self.grads else R)
        return tuple(needs)

    def _lie(self, op: Operator, needs: tuple[Placement | None, ...]) -> bool:
        """Return whether running statistics are stored as needed: they are written in place, so they cannot be redistributed first."""
        if self.fixed is None:
            return True
        statistics = [v for v in op.inputs if v in self.placed and v not in self.grads]
        stored = {v: R if (dim := self.fixed.get(v)) is None else self.shard(v, dim) for v in statistics}
        return all(need == stored.get(value, need) for value, need in zip(op.inputs, needs, strict=True))

    def _read(self, op: Operator, value: str, dim: int, label: str) -> Placement | None:
        """Return the input range placement of ranks for their output shards of sliding windows; None where a range is empty."""
        if (rule := self.rules[op.name]) is None:
            return None
        written = next((value, row.index(label)) for value, row in zip(op.outputs, rule.outputs, strict=True) if label in row)
        length, window = self.graph.tensors[value].shape[dim], windows_of(op, self.graph.tensors)[label]
        ranges = pieces(self.graph.tensors[written[0]].shape[written[1]], self.n)
        read = halo(dim, length, [window.needs(start, stop, length) for start, stop in ranges])
        if isinstance(self.shard(value, dim), Strided) or isinstance(self.shard(*written), Strided):  # such shards have no neighbors
            return None
        empty = isinstance(read, Halo) and any(start == stop for start, stop in read.windows)
        return None if empty else read
