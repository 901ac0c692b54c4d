"""How a precision computes: `PRECISIONS`, by the word of a layout. A row is all that rooms know of one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """One precision.

    `weights`: dtype of the weights that are trained, and of gradients, their sums and the optimizer's state. `products`: dtype that
    autocast makes of products' operands; empty where nothing is cast. `scaled`: whether the loss is multiplied before backward, since
    small gradients vanish in the range of `products` (Micikevicius et al. 2018, section 3.2). `bits`: of the fraction that units for
    products keep of operands, where those are cast nowhere else. `elsewhere`: as what it computes on devices without such units that are
    no GPUs, and how fast; empty where it is a precision of every device or of none. `linears`: dtype of the operands of linear layers,
    row by row with a scale of its own; gradients among them have more range (`float8_e5m2`), and their weights' gradients are products
    of `products`.
    """

    name: str
    weights: str = "float32"
    products: str = ""
    scaled: bool = False
    bits: int = 0
    elsewhere: str = ""
    linears: str = ""

    @property
    def wide(self) -> str:
        """The precision of products that are no linear layers."""
        return self.products if self.linears else self.name

    @property
    def rounds(self) -> bool:
        """Whether operands of products are rounded."""
        return bool(self.products or self.bits)

    @property
    def rounds_to(self) -> str:
        """The dtype whose rounding shows in the results."""
        return self.products or self.weights


PRECISIONS = {
    one.name: one
    for one in (
        Precision("float32"),
        Precision("tf32", bits=10, elsewhere="float32"),
        Precision("bfloat16", products="bfloat16"),
        Precision("float16", products="float16", scaled=True, elsewhere="float32"),
        Precision("float8", products="bfloat16", linears="float8_e4m3fn", elsewhere="bfloat16"),
        Precision("float64", weights="float64"),
    )
}
