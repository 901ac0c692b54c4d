"""Graphs of a few operators, written by hand: chains of random kinds, a net like AlexNet, a layer of experts."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.model.graph import Arg, Graph, Operator, Ref, Tensor, Variable


class Builder:
    """Collects operators on float32 tensors."""

    def __init__(self, **inputs: tuple[int, ...]) -> None:
        self.tensors = {name: Tensor(shape, "int64" if name == "ids" else "float32") for name, shape in inputs.items()}
        self.inputs = tuple(Variable(name, name, self.tensors[name], batched=True) for name in inputs)
        self.parameters: list[Variable] = []
        self.buffers: list[Variable] = []
        self.operators: list[Operator] = []

    def parameter(self, name: str, *shape: int) -> Ref:
        self.tensors[name] = Tensor(shape, "float32")
        self.parameters.append(Variable(name, name, self.tensors[name], trainable=True))
        return Ref(name)

    def buffer(self, name: str, *shape: int) -> Ref:
        self.tensors[name] = Tensor(shape, "float32")
        self.buffers.append(Variable(name, name, self.tensors[name]))
        return Ref(name)

    def call(self, target: str, shape: tuple[int, ...], *args: Arg, name: str = "", **kwargs: Arg) -> Ref:
        name = name or f"y{len(self.operators)}"
        self.tensors[name] = Tensor(shape, "float32")
        self.operators.append(Operator(name, f"aten.{target}", args, tuple(kwargs.items()), (name,), f"{name}/{target}"))
        return Ref(name)

    def graph(self, last: Ref, samples: int) -> Graph:
        loss = self.call("sum.default", (), last, name="loss")
        return Graph(tuple(self.parameters), tuple(self.buffers), self.inputs, (), tuple(self.operators), self.tensors, loss.value, samples)


def chain(kinds: Sequence[tuple[str, int, int]], size: int = 8) -> Graph:
    """Operators on [8, 8]; operands by number among what has been made. A weight is `size` x `size`."""
    b = Builder(x=(size, size), ids=(size,))
    square = (size, size)
    made = [Ref("x")]
    for i, (kind, left, right) in enumerate(kinds):
        x, y = made[left % len(made)], made[right % len(made)]
        if kind == "linear":
            made.append(b.call("linear.default", square, x, b.parameter(f"w{i}", *square)))
        elif kind == "biased":
            made.append(b.call("linear.default", square, x, b.parameter(f"w{i}", *square), b.parameter(f"b{i}", size)))
        elif kind == "embedding":
            made.append(b.call("embedding.default", square, b.parameter(f"w{i}", *square), Ref("ids")))
        elif kind == "norm":
            weights = (b.parameter(f"w{i}", size), b.parameter(f"b{i}", size))
            made.append(b.call("layer_norm.default", square, x, (size,), *weights))
        elif kind == "softmax":
            made.append(b.call("softmax.int", square, x, -1))
        elif kind == "square":
            made.append(b.call("mul.Tensor", square, x, x))
        else:
            target, args = {
                "add": ("add.Tensor", (x, y)),
                "mm": ("mm.default", (x, y)),
                "t": ("t.default", (x,)),
                "gelu": ("gelu.default", (x,)),
            }[kind]
            made.append(b.call(target, square, *args))
    return b.graph(made[-1], size)


def convolutions(kinds: Sequence[str], size: int = 4) -> Graph:
    """Operators on images [4, 4, 4, 4]."""
    shape = (size,) * 4
    b = Builder(x=shape)
    made = [Ref("x")]
    for i, kind in enumerate(kinds):
        x = made[-1]
        if kind == "conv":
            weights = (b.parameter(f"w{i}", size, size, 1, 1), b.parameter(f"b{i}", size))
            made.append(b.call("conv2d.default", shape, x, *weights))
        elif kind == "bn":
            weights = (b.parameter(f"w{i}", size), b.parameter(f"b{i}", size))
            running = (b.buffer(f"mean{i}", size), b.buffer(f"var{i}", size))
            made.append(b.call("batch_norm.default", shape, x, *weights, *running, True, 0.1, 1e-5, False))
        elif kind == "pool":
            made.append(b.call("max_pool2d.default", shape, x, (1, 1)))
        elif kind == "relu":
            made.append(b.call("relu.default", shape, x))
        else:
            made.append(b.call("add.Tensor", shape, x, made[0]))
    return b.graph(made[-1], size)


def alexnet(batch: int, image: int = 224) -> Graph:
    """Five convolutions and three fully connected layers, about as in Krizhevsky et al. 2012."""
    b = Builder(x=(batch, 3, image, image))
    x, channels = Ref("x"), 3
    for i, (features, kernel, shrink, pool) in enumerate(
        ((64, 11, 4, True), (192, 5, 1, True), (384, 3, 1, False), (256, 3, 1, False), (256, 3, 1, True))
    ):
        image //= shrink
        weights = (b.parameter(f"conv{i}.weight", features, channels, kernel, kernel), b.parameter(f"conv{i}.bias", features))
        x = b.call("conv2d.default", (batch, features, image, image), x, *weights)
        x = b.call("relu.default", (batch, features, image, image), x)
        if pool:
            image //= 2
            x = b.call("max_pool2d.default", (batch, features, image, image), x, (2, 2))
        channels = features
    width = channels * image * image
    x = b.call("view.default", (batch, width), x, (batch, width))
    for i, features in enumerate((4096, 4096, 1000)):
        x = b.call(
            "linear.default", (batch, features), x, b.parameter(f"fc{i}.weight", features, width), b.parameter(f"fc{i}.bias", features)
        )
        if i < 2:
            x = b.call("relu.default", (batch, features), x)
        width = features
    return b.graph(x, batch)


def experts(tokens: int, hidden: int, inner: int, count: int) -> Graph:
    """A dense layer, a feed-forward layer of each token's expert ([experts, tokens of one, hidden]), a dense layer."""
    b = Builder(x=(tokens, hidden))
    mine = tokens // count
    x = b.call("linear.default", (tokens, hidden), Ref("x"), b.parameter("dense0", hidden, hidden), name="before")
    x = b.call("softmax.int", (tokens, hidden), x, -1)
    x = b.call("view.default", (mine, count, hidden), x, (mine, count, hidden))
    x = b.call("transpose.int", (count, mine, hidden), x, 0, 1)
    x = b.call("bmm.default", (count, mine, inner), x, b.parameter("up", count, hidden, inner), name="first")
    x = b.call("gelu.default", (count, mine, inner), x)
    x = b.call("bmm.default", (count, mine, hidden), x, b.parameter("down", count, inner, hidden), name="second")
    x = b.call("transpose.int", (mine, count, hidden), x, 0, 1)
    x = b.call("reshape.default", (tokens, hidden), x, (tokens, hidden))
    x = b.call("linear.default", (tokens, hidden), x, b.parameter("dense1", hidden, hidden), name="after")
    return b.graph(x, tokens)
