"""A GPT as a `Graph`, written by hand: no torch, any size. Shared by the tests of cost and search."""

from __future__ import annotations

from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable


def gpt(layers: int = 2, hidden: int = 64, heads: int = 4, sequence: int = 32, vocabulary: int = 512, batch: int = 8) -> Graph:
    """Pre-norm blocks with biases, learned positions left out, an untied head and cross-entropy."""
    tensors: dict[str, Tensor] = {}
    parameters: list[Variable] = []
    operators: list[Operator] = []

    def parameter(name: str, *shape: int) -> Ref:
        value = "p_" + name.replace(".", "_")
        tensors[value] = Tensor(shape, "float32")
        parameters.append(Variable(value, name, tensors[value], trainable=True))
        return Ref(value)

    def call(
        target: str, args: tuple[object, ...], shape: tuple[int, ...], layer: str = "", kwargs: tuple[tuple[str, object], ...] = ()
    ) -> Ref:
        name = f"{target.split('.')[1]}_{len(operators)}"
        tensors[name] = Tensor(shape, "float32")
        operators.append(Operator(name, target, args, kwargs, (name,), f"{layer}/{name}"))
        return Ref(name)

    inputs = []
    for name in ("x", "y"):
        tensors[name] = Tensor((batch, sequence), "int64")
        inputs.append(Variable(name, name, tensors[name], batched=True))
    wide = (batch, sequence, hidden)
    z = call("aten.embedding.default", (parameter("emb.weight", vocabulary, hidden), Ref("x")), wide, "emb")
    for i in range(layers):
        at = f"h.{i}"

        def norm(x: Ref, name: str, at: str = at) -> Ref:
            weights = (parameter(f"{at}.{name}.weight", hidden), parameter(f"{at}.{name}.bias", hidden))
            return call("aten.layer_norm.default", (x, (hidden,), *weights), wide, f"{at}.{name}")

        def linear(x: Ref, name: str, n: int, m: int, at: str = at) -> Ref:
            weights = (parameter(f"{at}.{name}.weight", m, n), parameter(f"{at}.{name}.bias", m))
            return call("aten.linear.default", (x, *weights), (batch, sequence, m), f"{at}.{name}")

        normed = norm(z, "ln1")
        rows = []
        for name in ("q", "k", "v"):
            flat = linear(normed, name, hidden, hidden)
            split = call(
                "aten.view.default", (flat, (batch, sequence, heads, hidden // heads)), (batch, sequence, heads, hidden // heads), at
            )
            rows.append(call("aten.transpose.int", (split, 1, 2), (batch, heads, sequence, hidden // heads), at))
        a = call("aten.scaled_dot_product_attention.default", tuple(rows), (batch, heads, sequence, hidden // heads), at)
        a = call("aten.transpose.int", (a, 1, 2), (batch, sequence, heads, hidden // heads), at)
        a = call("aten.reshape.default", (a, wide), wide, at)
        z = call("aten.add.Tensor", (z, linear(a, "proj", hidden, hidden)), wide, at)
        u = linear(norm(z, "ln2"), "up", hidden, 4 * hidden)
        u = call("aten.gelu.default", (u,), (batch, sequence, 4 * hidden), at)
        z = call("aten.add.Tensor", (z, linear(u, "down", 4 * hidden, hidden)), wide, at)
    logits = call("aten.linear.default", (z, parameter("head.weight", vocabulary, hidden)), (batch, sequence, vocabulary), "head")
    flat = call("aten.view.default", (logits, (batch * sequence, vocabulary)), (batch * sequence, vocabulary))
    labels = call("aten.view.default", (Ref("y"), (batch * sequence,)), (batch * sequence,))
    tensors[labels.value] = Tensor((batch * sequence,), "int64")
    loss = call("aten.cross_entropy_loss.default", (flat, labels), ())
    return Graph(tuple(parameters), (), tuple(inputs), (), tuple(operators), tensors, loss.value, batch)
