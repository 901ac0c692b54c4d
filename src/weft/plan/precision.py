"""How a precision computes: `PRECISIONS`, by the word of a layout. A row is all that rooms know of one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """One precision.

    `weights`: dtype of the weights that are trained, and of gradients, their sums and the optimizer's state. `products`: dtype that
    autocast makes of products' operands; empty where nothing is cast. `scaled`: whether the loss is multiplied before backward, since
    small gradients vanish in the range of `products` (Micikevicius et al. 2018, section 3.2).
    """

    name: str
    weights: str = "float32"
    products: str = ""
    scaled: bool = False

    @property
    def rounds_to(self) -> str:
        """The dtype whose rounding shows in the results."""
        return self.products or self.weights


PRECISIONS = {
    one.name: one
    for one in (
        Precision("float32"),
        Precision("bfloat16", products="bfloat16"),
        Precision("float16", products="float16", scaled=True),
        Precision("float64", weights="float64"),
    )
}
