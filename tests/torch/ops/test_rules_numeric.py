"""The property of factor rules: whatever label a rule offers, the operator cut on it and lowered is the operator.

Shapes are drawn; every label is cut into 2 and 3 parts where it divides; outputs, gradients and written buffers are compared in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.lower.operator_lowering import LOWERINGS
from shardwise.ops import RECORDS, Rule, rule_of
from shardwise.ops.rule import KERNELS
from shardwise.ops.vocabulary import LoweringKind
from tests.support.rule_cases import Case, case, check, choices, difference

Draw = Callable[[st.SearchStrategy[Any]], Any]
SIZES = st.sampled_from((1, 2, 3, 4, 6))
WIDE = st.sampled_from((2, 4, 6))


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def shape(draw: Draw, least: int = 1, most: int = 4) -> list[int]:
    return draw(st.lists(SIZES, min_size=least, max_size=most))  # type: ignore[no-any-return]


def narrowed(draw: Draw, full: list[int]) -> list[int]:
    """A shape that broadcasts to `full`."""
    start = draw(st.integers(0, len(full)))
    return [n if draw(st.booleans()) else 1 for n in full[start:]]


def maybe(draw: Draw, x: Tensor) -> Tensor | None:
    return x if draw(st.booleans()) else None


def linear(draw: Draw) -> Case:
    lead, i, o = shape(draw, 0, 3), draw(WIDE), draw(WIDE)
    return case("linear.default", real(*lead, i), real(o, i), maybe(draw, real(o)))


def matmul(draw: Draw) -> Case:
    lead, n, k, m = shape(draw, 0, 2), draw(SIZES), draw(WIDE), draw(SIZES)
    return case("matmul.default", real(*narrowed(draw, lead), n, k), real(*narrowed(draw, lead), k, m))


def products(draw: Draw) -> Case:
    b, n, k, m = (draw(SIZES) for _ in range(4))
    return draw(
        st.sampled_from(
            (
                lambda: case("mm.default", real(n, k), real(k, m)),
                lambda: case("bmm.default", real(b, n, k), real(b, k, m)),
                lambda: case("addmm.default", real(n, m), real(n, k), real(k, m)),
                lambda: case("addmm.default", real(m), real(n, k), real(k, m)),
                lambda: case("baddbmm.default", real(b, n, m), real(b, n, k), real(b, k, m)),
                lambda: case("mv.default", real(n, k), real(k)),
                lambda: case("dot.default", real(k), real(k)),
                lambda: case("outer.default", real(n), real(m)),
                lambda: case("bilinear.default", real(b, n), real(b, k), real(m, n, k), maybe(draw, real(m))),
            )
        )
    )()


def einsum(draw: Draw) -> Case:
    sizes = {x: draw(SIZES) for x in "abcde"}
    equations = "ab,bc->ac abc,abd->acd abc,acd->abd abcd,abde->abce ab,ab->a abc->cab ab,c->abc abc,dc->abd".split()
    equation = draw(st.sampled_from(equations))
    terms = equation.partition("->")[0].split(",")
    return case("einsum.default", equation, [real(*(sizes[x] for x in t)) for t in terms])


def conv(draw: Draw) -> Case:
    dims = draw(st.integers(1, 3))
    n, groups, i, o = draw(WIDE), draw(st.sampled_from((1, 1, 2, 3, 4))), draw(st.sampled_from((2, 3))), draw(st.sampled_from((2, 3)))
    transposed = draw(st.booleans())
    kernel, stride, padding = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 1))
    image = [draw(st.sampled_from((4, 6))) for _ in range(dims)]
    x, bias = real(n, i * groups, *image), maybe(draw, real(o * groups))
    if transposed:
        weight = real(i * groups, o, *[kernel] * dims)
        name = {1: "conv_transpose1d.default", 2: "conv_transpose2d.input", 3: "conv_transpose3d.input"}[dims]
        return case(name, x, weight, bias, [stride] * dims, [min(padding, kernel - 1)] * dims, [0] * dims, groups, [1] * dims)
    weight = real(o * groups, i, *[kernel] * dims)
    if draw(st.booleans()) and stride == 1:
        return case(f"conv{dims}d.padding", x, weight, bias, [1] * dims, "same", [1] * dims, groups)
    return case(f"conv{dims}d.default", x, weight, bias, [stride] * dims, [padding] * dims, [1] * dims, groups)


def pointwise(draw: Draw) -> Case:
    """Windows of one element over few places: one product, of what a rank has of samples and channels."""
    image = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 2)))]
    x, bias = real(48, draw(st.sampled_from((2, 3, 6))), *image), maybe(draw, real(6))
    return case(f"conv{len(image)}d.default", x, real(6, x.shape[1], *[1] * len(image)), bias)


def pooling(draw: Draw) -> Case:
    x = real(draw(WIDE), draw(WIDE), 6, 6)
    return draw(
        st.sampled_from(
            (
                lambda: case("max_pool2d.default", x, [2, 2]),
                lambda: case("avg_pool2d.default", x, [3, 3], [1, 1], [1, 1]),
                lambda: case("adaptive_avg_pool2d.default", x, [3, 2]),
                lambda: case("adaptive_max_pool2d.default", x, [2, 2]),
                lambda: case("upsample_nearest2d.vec", x, [12, 12], None),
                lambda: case("upsample_bilinear2d.vec", x, [12, 9], False, None),
                lambda: case("pixel_shuffle.default", real(2, 4, 6, 6), 2),
                lambda: case("max_pool1d.default", real(2, 4, 6), [2]),
                lambda: case("avg_pool3d.default", real(2, 2, 4, 4, 4), [2, 2, 2]),
                lambda: case("grid_sampler.default", x, positive(x.shape[0], 4, 4, 2), 0, 0, False),
            )
        )
    )()


def attention(draw: Draw) -> Case:
    b, h, s, t, d, e = draw(WIDE), draw(st.sampled_from((1, 2, 4, 6))), draw(SIZES), draw(WIDE), draw(WIDE), draw(WIDE)
    grouped = draw(st.booleans()) and h > 1
    keys = draw(st.sampled_from([k for k in (1, 2, 3) if h % k == 0])) if grouped else h
    causal = draw(st.booleans())
    mask = None
    if not causal and draw(st.booleans()):
        full = [b, h, s, t]
        mask = draw(
            st.sampled_from(
                (
                    lambda: real(*full),
                    lambda: real(s, t),
                    lambda: real(t),
                    lambda: real(b, 1, s, t),
                    lambda: real(b, 1, 1, t),
                    lambda: real(1, h, s, t),
                    lambda: torch.ones(b, 1, s, t, dtype=torch.bool).tril(),
                )
            )
        )()
    options: dict[str, Any] = {"enable_gqa": True} if keys != h else {}
    if draw(st.booleans()):
        options["scale"] = 0.5
    args = (real(b, h, s, d), real(b, keys, t, d), real(b, keys, t, e))
    return case("scaled_dot_product_attention.default", *args, mask, 0.0, causal, **options)


def attention_of_three(draw: Draw) -> Case:
    b, s, d = draw(WIDE), draw(WIDE), draw(WIDE)
    return case("scaled_dot_product_attention.default", real(b, s, d), real(b, s, d), real(b, s, d))


def embedding(draw: Draw) -> Case:
    rows, ids = draw(st.sampled_from((6, 12))), whole(6, *shape(draw, 1, 3))
    return case("embedding.default", real(rows, draw(WIDE)), ids, draw(st.sampled_from((-1, 0, 3, 5))), draw(st.booleans()))


def norms(draw: Draw) -> Case:
    lead, n = shape(draw, 1, 3), draw(WIDE)
    weight, bias = maybe(draw, real(n)), maybe(draw, real(n))
    x = real(*lead, 4, n)
    image = real(draw(WIDE), 6, *shape(draw, 0, 2))
    return draw(
        st.sampled_from(
            (
                lambda: case("layer_norm.default", x, [n], weight, bias if weight is not None else None),
                lambda: case("layer_norm.default", x, [4, n], real(4, n), real(4, n)),
                lambda: case("rms_norm.default", x, [n], weight),
                lambda: case("group_norm.default", image, 3, real(6), real(6)),
                lambda: case("group_norm.default", real(2, 6, 4, 4), 2, real(6), real(6)),
                lambda: case("instance_norm.default", real(2, 4, 6), real(4), real(4), None, None, True, 0.1, 1e-5, False),
            )
        )
    )()


def batch_norm(draw: Draw) -> Case:
    c = draw(WIDE)
    x = real(draw(WIDE), c, *shape(draw, 0, 2))
    running = (real(c), positive(c)) if draw(st.booleans()) else (None, None)
    affine = (real(c), real(c)) if draw(st.booleans()) else (None, None)
    if x.numel() // c == 1 or (training := draw(st.booleans()) or running[0] is None) is None:
        x, training = real(2, c), True
    first = 1 + 2 * (affine[0] is not None)
    buffers = () if running[0] is None else (first, first + 1)
    return case("batch_norm.default", x, *affine, *running, training, 0.1, 1e-5, False, buffers=buffers)


def cross_entropy(draw: Draw) -> Case:
    n, c = draw(WIDE), draw(st.sampled_from((4, 6, 12)))
    target = whole(c, n)
    target[draw(st.integers(0, n - 1))] = -100
    target[0] = 1
    weight = positive(c) if draw(st.booleans()) else None
    smoothing = draw(st.sampled_from((0.0, 0.1)))
    ignore = draw(st.sampled_from((-100, 2)))
    target[target == -100] = ignore
    kept = () if weight is None else (2,)
    reduction = draw(st.sampled_from((1, 1, 2, 0)))
    return case("cross_entropy_loss.default", real(n, c), target, weight, reduction, ignore, smoothing, buffers=kept)


def cross_entropy_defaults(draw: Draw) -> Case:
    n, c = draw(WIDE), draw(WIDE)
    return case("cross_entropy_loss.default", real(n, c), whole(c, n))


def images_of_classes(draw: Draw) -> Case:
    c, rest = draw(WIDE), shape(draw, 1, 2)
    target = whole(c, 4, *rest)
    target[(0,) * target.dim()] = -100
    weight = positive(c) if draw(st.booleans()) else None
    smoothing = draw(st.sampled_from((0.0, 0.1)))
    kept = () if weight is None else (2,)
    reduction = draw(st.sampled_from((1, 1, 2, 0)))
    return case("cross_entropy_loss.default", real(4, c, *rest), target, weight, reduction, -100, smoothing, buffers=kept)


def patches(draw: Draw) -> Case:
    n, c = draw(WIDE), draw(WIDE)
    if draw(st.booleans()):
        return case("im2col.default", real(n, c, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2])
    return case("col2im.default", real(n, c * 4, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])


def repeated(draw: Draw) -> Case:
    full = shape(draw)
    return case("repeat_interleave.self_int", real(*full), draw(st.integers(1, 3)), draw(st.integers(-len(full), len(full) - 1)))


def transformed(draw: Draw) -> Case:
    """Magnitudes, since what is compared is real."""
    full = shape(draw, 2, 3)
    dims = sorted(draw(st.sets(st.integers(0, len(full) - 1), min_size=1, max_size=len(full))))
    return case("fft_fftn.default", real(*full), None, dims)


def parametric(draw: Draw) -> Case:
    c = draw(WIDE)
    return case("prelu.default", real(draw(WIDE), c, *shape(draw, 0, 2)), real(c) if draw(st.booleans()) else real(1))


def distances(draw: Draw) -> Case:
    b = draw(WIDE)
    return case("cdist.default", real(b, 4, 3), real(b, 6, 3), 2.0, None)


def nll(draw: Draw) -> Case:
    n, c = draw(WIDE), draw(WIDE)
    weight = maybe(draw, positive(c))
    kept = () if weight is None else (2,)
    return case("nll_loss_nd.default", real(n, c), whole(c, n), weight, draw(st.sampled_from((1, 2, 0))), buffers=kept)


def losses(draw: Draw) -> Case:
    full = shape(draw)
    names = "kl_div mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits"
    name = draw(st.sampled_from(sorted(names.split())))
    x, y, reduction = positive(*full), positive(*full), draw(st.sampled_from((0, 1, 2)))
    if name.startswith("binary"):
        weight = maybe(draw, positive(*full))
        middle = (weight, None) if name.endswith("logits") else (weight,)
        return case(f"{name}.default", x, y, *middle, reduction, buffers=() if weight is None else (2,))
    kept = (1,) if name == "soft_margin_loss" else ()  # it has no gradient for targets
    given = () if reduction == 1 and draw(st.booleans()) else (reduction,)
    return case(f"{name}.default", x, y, *given, buffers=kept)


UNARY = """
neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan asin acos atan asinh atanh sinh cosh tanh
erf erfc sigmoid relu relu6 gelu silu mish hardswish hardsigmoid hardtanh leaky_relu elu selu celu softplus log_sigmoid
logit floor ceil round trunc frac isnan isinf isfinite nan_to_num contiguous detach alias zeros_like ones_like clone
""".split()


def unary(draw: Draw) -> Case:
    return case(f"{draw(st.sampled_from(UNARY))}.default", positive(*shape(draw, 0)))


def binary(draw: Draw) -> Case:
    full = shape(draw, 0)
    x, y = positive(*narrowed(draw, full)), positive(*narrowed(draw, full))
    plain = "maximum minimum atan2 fmin fmax hypot logical_and".split()
    others = "add sub mul div remainder fmod xlogy eq lt ge".split()
    names = [*(f"{n}.default" for n in plain), *(f"{n}.Tensor" for n in others), "pow.Tensor_Tensor"]
    return case(draw(st.sampled_from(names)), x, y)


def ternary(draw: Draw) -> Case:
    full = shape(draw)
    x, y, z = (positive(*narrowed(draw, full)) for _ in range(3))
    return draw(
        st.sampled_from(
            (
                lambda: case("where.self", x > 0.5, y, z),
                lambda: case("addcmul.default", x, y, z),
                lambda: case("addcdiv.default", x, y, z),
                lambda: case("lerp.Tensor", x, y, z),
                lambda: case("clamp.Tensor", positive(*full), torch.tensor(0.2).double(), None),
                lambda: case("masked_fill.Scalar", positive(*full), positive(*narrowed(draw, full)) > 0.5, -1.0),
                lambda: case("rsub.Scalar", x, 2.0),
                lambda: case("pow.Tensor_Scalar", x, 3),
                lambda: case("dropout.default", x, 0.0, True),
                lambda: case("type_as.default", x, real(*shape(draw, 0))),  # whose dtype is read, whatever its shape
                lambda: case("copy.default", positive(*full), x),
            )
        )
    )()


def reductions(draw: Draw) -> Case:
    x = real(*shape(draw, 1, 3))
    rank = x.dim()
    dims, keep = draw(st.lists(st.integers(-rank, rank - 1), min_size=1, max_size=2, unique_by=lambda d: d % rank)), draw(st.booleans())
    d = dims[0]
    return draw(
        st.sampled_from(
            (
                lambda: case("sum.default", x),
                lambda: case("mean.default", x),
                lambda: case("sum.dim_IntList", x, dims, keep),
                lambda: case("mean.dim", x, dims, keep),
                lambda: case("mean.dim", x, None, keep),
                lambda: case("amax.default", x, dims, keep),
                lambda: case("amin.default", x, dims, keep),
                lambda: case("max.dim", x, d, keep),
                lambda: case("max.default", x),
                lambda: case("min.default", x.round()),
                lambda: case("amax.default", x.round(), dims, keep),
                lambda: case("max.other", x, real(*x.shape)),
                lambda: case("argmax.default", x, d, keep),
                lambda: case("argmax.default", x),
                lambda: case("any.dim", x > 0, d, keep),
                lambda: case("prod.dim_int", x, d, keep),
                lambda: case("var.correction", real(*x.shape[:-1], 4), [-1], correction=1, keepdim=keep),
                lambda: case("std.correction", real(*x.shape[:-1], 4), [-1], correction=1, keepdim=keep),
                lambda: case("var_mean.correction", real(*x.shape[:-1], 4), [-1], correction=0, keepdim=keep),
                lambda: case("linalg_vector_norm.default", x, 2, dims, keep),
                lambda: case("norm.ScalarOpt_dim", x, 2, [d], keep),
                lambda: case("norm.Scalar", x, 2),
                lambda: case("sum.default", x > 0),
            )
        )
    )()


def along(draw: Draw) -> Case:
    full = shape(draw, 1, 3)
    x, rank = real(*full), len(full)
    d = draw(st.integers(-rank, rank - 1))
    n = full[d]
    return draw(
        st.sampled_from(
            (
                lambda: case("softmax.int", x, d),
                lambda: case("log_softmax.int", x, d),
                lambda: case("_softmax.default", x, d, False),
                lambda: case("cumsum.default", x, d),
                lambda: case("cumprod.default", x, d),
                lambda: case("logcumsumexp.default", x, d),
                lambda: case("flip.default", x, [d]),
                lambda: case("sort.default", x, d),
                lambda: case("sort.default", x),
                lambda: case("argsort.default", x, d),
                lambda: case("topk.default", x, 1, d),
                lambda: case("topk.default", x, 1),
                lambda: case("kthvalue.default", x, 1, d),
                lambda: case("roll.default", x, [1], [d]),
                lambda: case("roll.default", x, [1]),
                lambda: case("logsumexp.default", x, [d], False),
                lambda: case("logsumexp.default", x, [d], True),
                lambda: case("gather.default", x, d, whole(n, *full)),
                lambda: case("index_select.default", x, d, whole(n, 3)),
                lambda: case("scatter.src", x, d, torch.argsort(real(*full), d), real(*full)),
                lambda: case("scatter.value", x, d, whole(n, *full), 2.0),
                lambda: case("scatter_add.default", x, d, whole(n, *full), real(*full)),
                lambda: case("index_add.default", x, d, whole(n, n), real(*full)),
                lambda: case("cummax.default", x, d),
                lambda: case("diff.default", real(*full[:-1], 4), 1, -1),
                lambda: case("glu.default", real(*full, 4), -1),
                lambda: case("glu.default", real(*full, 4)),
                lambda: case("take_along_dim.default", x, whole(n, *full), d),
            )
        )
    )()


def views(draw: Draw) -> Case:
    full = shape(draw, 2, 4)
    x, rank = real(*full), len(full)
    d, e = draw(st.integers(-rank, rank - 1)), draw(st.integers(-rank, rank - 1))
    n = full[d]
    flat = x.numel()
    target = draw(st.sampled_from([(flat,), (1, flat), *([(a, flat // a) for a in (2, 3, 4, 6) if flat % a == 0])]))
    order = draw(st.permutations(range(rank)))
    return draw(
        st.sampled_from(
            (
                lambda: case("view.default", x, target),
                lambda: case("reshape.default", x, target),
                lambda: case("view.default", real(flat), full),
                lambda: case("flatten.using_ints", x, 0, 1),
                lambda: case("unflatten.int", real(2, 6), 1, [2, 3]),
                lambda: case("view_as.default", x, real(flat)),
                lambda: case("unsqueeze.default", x, d),
                lambda: case("squeeze.default", x),
                lambda: case("squeeze.dim", x, d),
                lambda: case("transpose.int", x, d, e),
                lambda: case("permute.default", x, list(order)),
                lambda: case("t.default", real(*full[:2])),
                lambda: case("mT.default", x),
                lambda: case("expand.default", real(1, *full), [3, *full]),
                lambda: case("expand.default", x, [2, *full]),
                lambda: case("expand.default", x, [-1] * rank),
                lambda: case("expand_as.default", real(1, *full), real(2, *full)),
                lambda: case("slice.Tensor", x, d, 0, max(n - 1, 1)),
                lambda: case("slice.Tensor", x, d, 0, 2**63 - 1),
                lambda: case("slice.Tensor", x, d, 0, n, 2),
                lambda: case("select.int", x, d, n - 1),
                lambda: case("narrow.default", x, d, 0, 1),
                lambda: case("slice_scatter.default", x, x.narrow(d, 0, 1).clone() + 1, d, 0, 1),
                lambda: case("select_scatter.default", x, x.select(d, 0).clone() + 1, d, 0),
                lambda: case("cat.default", [x, real(*full)], d),
                lambda: case("cat.default", [x, real(*full)]),
                lambda: case("stack.default", [x, real(*full)], d),
                lambda: case("split.Tensor", x, max(n // 2, 1), d),
                lambda: case("split_with_sizes.default", real(*full, 3), [1, 2], -1),
                lambda: case("chunk.default", x, 2, d),
                lambda: case("unbind.int", x, d),
                lambda: case("unfold.default", x, d, max(n - 1, 1), 1),
                lambda: case("repeat.default", x, [2, *[1] * (rank - 1), 2]),
                lambda: case("repeat.default", x, [2, *[1] * (rank - 1)]),
                lambda: case("pad.default", x, [1, -1]),
                lambda: case("constant_pad_nd.default", x, [0, 0, 1, 0], 2.0),
                lambda: case("tril.default", x),
                lambda: case("triu.default", x, 1),
                lambda: case("one_hot.default", whole(5, *full), 5),
            )
        )
    )()


def index(draw: Draw) -> Case:
    full = shape(draw, 2, 3)
    x, n, m = real(*full), full[0], full[1]
    a, b = shape(draw, 1, 2), draw(SIZES)
    return draw(
        st.sampled_from(
            (
                lambda: case("index.Tensor", x, [whole(n, *a)]),
                lambda: case("index.Tensor", x, [None, whole(m, *a)]),
                lambda: case("index.Tensor", x, [whole(n, b), whole(m, b)]),
                lambda: case("index.Tensor", x, [whole(n, b, 1), whole(m, 2)]),
                lambda: case("index.Tensor", real(*full, 3), [whole(n, b), None, whole(full[2] if len(full) > 2 else 3, b)]),
                lambda: case("index.Tensor", x, [real(n) > 0]),
            )
        )
    )()


def recurrent(draw: Draw) -> Case:
    b, t, i, h, first = draw(WIDE), draw(st.integers(1, 3)), 3, 2, draw(st.booleans())
    x = real(b, t, i) if first else real(t, b, i)
    lstm = draw(st.booleans())
    gates = 4 if lstm else 3
    weights = [real(gates * h, i), real(gates * h, h), real(gates * h), real(gates * h)]
    states = [real(1, b, h) for _ in range(1 + lstm)]
    rest = (weights, True, 1, 0.0, True, False, first)
    return case("lstm.input", x, states, *rest) if lstm else case("gru.input", x, states[0], *rest)


FAMILIES = (
    linear, matmul, products, einsum, conv, pointwise, pooling, attention, attention_of_three, embedding, norms, batch_norm, cross_entropy,
    cross_entropy_defaults, images_of_classes, patches, repeated, transformed, parametric, distances,
    nll, losses, unary, binary, ternary, reductions, along, views, index, recurrent,
)  # fmt: skip
MANY = {"views": 60, "along": 50, "reductions": 45, "conv": 20, "unary": 30, "attention": 20, "products": 20, "norms": 20, "ternary": 20}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_cut_operators_are_the_operator(family: Callable[[Draw], Case]) -> None:
    @settings(max_examples=MANY.get(family.__name__, 12), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def holds(drawn: st.DataObject) -> None:
        torch.manual_seed(0)
        one = family(drawn.draw)
        rule = rule_of(one.op, one.graph.tensors)
        assert rule is None or set(rule.kernels.values()) <= set(KERNELS)
        wrong = check(one)
        assert not wrong, "\n".join(wrong)

    holds()


WRONG: list[tuple[str, Callable[[], Case], Rule]] = [
    ("softmax along the cut", lambda: case("softmax.int", real(4, 6), -1), Rule((("a", "b"),), (("a", "b"),))),
    ("cumsum along the cut", lambda: case("cumsum.default", real(4, 6), 1), Rule((("a", "b"),), (("a", "b"),))),
    ("layer norm's own dimension", lambda: case("layer_norm.default", real(4, 6), [6]), Rule((("a", "b"),), (("a", "b"),))),
    (
        "halo",
        lambda: case("conv1d.default", real(2, 3, 6), real(4, 3, 3), None, [1], [1], [1], 1),
        Rule((("n", "", "w"), ("", "", "")), (("n", "", "w"),)),
    ),
    ("another dimension", lambda: case("transpose.int", real(4, 6), 0, 1), Rule((("a", "b"),), (("a", "b"),))),
    ("a weight that is whole", lambda: case("linear.default", real(4, 6), real(6, 6)), Rule((("b", ""), ("", "")), (("b", "o"),))),
    ("an inner dimension", lambda: case("view.default", real(4, 6), [24]), Rule((("", "a"),), (("a",),))),
    ("an average that is summed", lambda: case("mse_loss.default", real(4, 6), real(4, 6)), Rule((("a", ""), ("a", "")), ((),))),
    (
        "keys of other rows",
        lambda: case("scaled_dot_product_attention.default", *[real(2, 4, 6, 2) for _ in range(3)]),
        Rule((("b", "h", "s", ""),) * 3, (("b", "h", "s", ""),)),
    ),
    ("halves of glu", lambda: case("glu.default", real(4, 8), -1), Rule((("a", "b"),), (("a", "b"),))),
    ("concatenated", lambda: case("cat.default", [real(4, 2), real(4, 6)], 1), Rule((("a", "b"), ("a", "b")), (("a", "b"),))),
]  # fmt: skip


def test_every_word_for_lowering_has_a_way_and_every_way_a_word() -> None:
    assert {record.lowering for record in RECORDS.values()} - {LoweringKind.NONE} == set(LOWERINGS)


@pytest.mark.parametrize(("make", "wrong"), [(m, r) for _, m, r in WRONG], ids=[name for name, *_ in WRONG])
def test_a_wrong_rule_is_caught(make: Callable[[], Case], wrong: Rule) -> None:
    torch.manual_seed(0)
    made = make()
    right = rule_of(made.op, made.graph.tensors)
    assert right is not None
    assert not check(made, (2,)), "with the right rule it passes"
    found = []
    for choice in choices(made, 2, rule=wrong):
        try:
            found.append(difference(made, {"tensor": (2, choice)}))
        except (RuntimeError, IndexError, ValueError) as error:
            found.append(str(error))
    assert any(found)


def two_axes() -> list[Case]:
    target = whole(8, 8)
    target[3] = -100
    x, c = real(4, 8, 8), 8
    return [
        case("linear.default", x, real(8, 8), real(8)),
        case("matmul.default", x, real(4, 8, 4)),
        case("cross_entropy_loss.default", real(8, 8), target),
        case("embedding.default", real(8, 4), whole(8, 4, 4), 3),
        case("batch_norm.default", x, real(c), real(c), real(c), positive(c), True, 0.1, 1e-5, False, buffers=(3, 4)),
        case("conv2d.default", real(4, 4, 3, 3), real(4, 4, 2, 2), real(4)),
        case("mean.default", x),
        case("view.default", x, [4, 8, 4, 2]),
        case("mse_loss.default", x, real(4, 8, 8)),
    ]


@pytest.mark.parametrize("number", range(9))
def test_two_axes_at_once(number: int) -> None:
    """Every pair of different labels, one over data and one over tensor."""
    torch.manual_seed(0)
    made = two_axes()[number]
    seen = 0
    for first in choices(made, 2, "data"):
        for second in choices(made, 2, "tensor"):
            if first.label != second.label:
                seen += 1
                wrong = difference(made, {"data": (2, first), "tensor": (2, second)})
                assert not wrong, f"{made.op.target} cut by {first.label} and {second.label}: {wrong}"
    assert seen >= 2


OFFERED: list[tuple[str, Callable[[], Case], set[str]]] = [
    ("linear", lambda: case("linear.default", real(2, 4, 6), real(8, 6)), {"b-2", "b-1", "i", "o"}),
    ("attention", lambda: case("scaled_dot_product_attention.default", *[real(2, 4, 6, 2) for _ in range(3)]), {"b-1", "h"}),
    ("embedding", lambda: case("embedding.default", real(12, 6), whole(6, 2, 4)), {"b-2", "b-1", "e", "v"}),
    ("cross-entropy", lambda: case("cross_entropy_loss.default", real(4, 6), whole(6, 4)), {"n0", "c"}),
    ("cross-entropy of images", lambda: case("cross_entropy_loss.default", real(4, 6, 2, 2), whole(6, 4, 2, 2)), {"n0", "n1", "n2"}),
    ("repetition", lambda: case("repeat_interleave.self_int", real(4, 6), 3, 1), {"d0", "d1"}),
    ("Fourier transform", lambda: case("fft_fftn.default", real(4, 6, 2), None, [1, 2]), {"d0"}),
    ("PReLU", lambda: case("prelu.default", real(4, 6, 2), real(6)), {"n", "c", "s-1"}),
    ("patches", lambda: case("im2col.default", real(4, 6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]), {"n"}),
    ("distances", lambda: case("cdist.default", real(2, 4, 3), real(2, 6, 3), 2.0, None), {"b-1", "n", "m"}),
    ("convolution", lambda: case("conv2d.default", real(2, 4, 6, 6), real(8, 4, 3, 3)), {"n", "i", "o"}),
    (
        "batch norm",
        lambda: case("batch_norm.default", real(2, 4, 6, 6), real(4), real(4), None, None, True, 0.1, 1e-5, False),
        {"n", "c", "s-2", "s-1"},
    ),
    ("softmax", lambda: case("softmax.int", real(2, 4, 6), -1), {"d0", "d1"}),
    ("windows", lambda: case("unfold.default", real(2, 4, 6), 1, 2, 1), {"d0", "d2"}),
    ("a mask that is written", lambda: case("index_put.default", real(4, 6), [real(4, 6) > 0], real()), {"d0", "d1"}),
    ("rows that are written", lambda: case("index_put.default", real(4, 6), [real(4) > 0], real()), {"d0", "d1"}),
    ("layer norm", lambda: case("layer_norm.default", real(2, 4, 6), [6]), {"b-2", "b-1"}),
    ("mean of a scalar", lambda: case("mean.dim", real(), [0]), set()),
    ("maximum of a scalar", lambda: case("amax.default", real(), [-1]), set()),
]  # fmt: skip


@pytest.mark.parametrize(("make", "labels"), [(m, x) for _, m, x in OFFERED], ids=[name for name, *_ in OFFERED])
def test_the_ways_that_are_known_are_offered(make: Callable[[], Case], labels: set[str]) -> None:
    """A rule that offers nothing would pass the property above."""
    assert {choice.label for choice in choices(make(), 2)} == labels


def test_every_operator_that_has_a_rule_is_one_of_torch() -> None:
    names = [name[5:] for name, op in RECORDS.items() if op.rule is not None and name.startswith("aten.")]
    unknown = {name for name in names if not hasattr(torch.ops.aten, name)}
    assert not unknown
