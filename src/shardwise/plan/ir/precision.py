"""Precisions of computation: `PRECISIONS`, by the word of a layout, with all their dtypes and properties."""

from __future__ import annotations

from dataclasses import dataclass

MIXED = "bfloat16-mixed"


@dataclass(frozen=True, slots=True)
class Precision:
    """One precision.

    `weight_dtype`: dtype of the trained weights, and of gradients, their reductions and the optimizer's state. `product_dtype`: dtype to
    which autocast casts products' operands; empty where nothing is cast. `scales_loss`: whether the loss is scaled before backward, since
    small gradients underflow in `product_dtype` (Micikevicius et al. 2018, section 3.2). `fraction_bits`: bits of the fraction that matrix
    units keep of operands, where those are not cast. `substitute`: the precision whose results and speed it has on devices other than GPUs
    without such units; empty where it is a precision of every device or of none. `linear_dtype`: dtype of the operands of linear layers,
    with a scale for each row; gradients among them have more range (`float8_e5m2`), and gradients of weights are products in
    `product_dtype`. `scales_tensors`: each operand has one scale instead, and gradients of weights are products in 8 bits as well.
    `held_dtype`: dtype in which weights are held and read while the model runs, of which the optimizer then has its own
    pieces in `weight_dtype` (the main weights); empty where both are the same tensors.
    """

    name: str
    weight_dtype: str = "float32"
    product_dtype: str = ""
    scales_loss: bool = False
    fraction_bits: int = 0
    substitute: str = ""
    linear_dtype: str = ""
    held_dtype: str = ""
    scales_tensors: bool = False

    @property
    def product_precision(self) -> str:
        """Return the precision of products that are no linear layers."""
        return self.product_dtype if self.linear_dtype else self.kernel_precision

    @property
    def kernel_precision(self) -> str:
        """Return the precision whose kernels it runs: that of autocast, where only weights are held otherwise."""
        return self.product_dtype if self.held_dtype and not self.linear_dtype else self.name

    @property
    def device_precision(self) -> str:
        """Return the precision by which devices list the rate of its products."""
        return "float8" if self.linear_dtype else self.kernel_precision

    @property
    def rounds_operands(self) -> bool:
        """Return whether operands of products are rounded."""
        return bool(self.product_dtype or self.fraction_bits)

    @property
    def rounding_dtype(self) -> str:
        """Return the dtype whose rounding shows in the results."""
        return self.product_dtype or self.weight_dtype


PRECISIONS = {
    one.name: one
    for one in (
        Precision("float32"),
        Precision("tf32", fraction_bits=10, substitute="float32"),
        Precision("bfloat16", product_dtype="bfloat16"),
        Precision(MIXED, product_dtype="bfloat16", held_dtype="bfloat16"),
        Precision("float16", product_dtype="float16", scales_loss=True, substitute="float32"),
        Precision(
            "float8",
            product_dtype="bfloat16",
            linear_dtype="float8_e4m3fn",
            substitute="bfloat16",
            held_dtype="bfloat16",
            scales_tensors=True,
        ),
        Precision("float8-rows", product_dtype="bfloat16", linear_dtype="float8_e4m3fn", substitute="bfloat16", held_dtype="bfloat16"),
        Precision("float64", weight_dtype="float64"),
    )
}
