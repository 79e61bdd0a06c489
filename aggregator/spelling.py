"""What is one function in several ways of calling it, and in two frameworks. Tables, used by `rename`."""

from __future__ import annotations

from dataclasses import dataclass

API_PREFIXES = frozenset({"Torch", "Tensor", "Functional", "Mint", "MintFunctional"})
"""Ways to call one function: of the library, as a method, of its functional module."""

MINT = {"Mint": "Torch", "MintFunctional": "Functional"}

OPERATORS = {
    "__add__": "add",
    "__iadd__": "add_",
    "__sub__": "sub",
    "__isub__": "sub_",
    "__mul__": "mul",
    "__imul__": "mul_",
    "__truediv__": "div",
    "__itruediv__": "div_",
    "true_divide": "div",
    "__floordiv__": "floor_divide",
    "__mod__": "remainder",
    "__pow__": "pow",
    "__matmul__": "matmul",
    "__neg__": "neg",
    "__abs__": "abs",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__invert__": "bitwise_not",
}
"""Operators whose operands stand in the order of the function's. (`__radd__` and its kin swap them.)"""

MINDSPORE_APIS = {
    "broadcast_to": "expand",
    "clip_by_value": "clamp",
    "dense": "linear",
    "equal": "eq",
    "floor_div": "floor_divide",
    "gather_elements": "gather",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "standard_normal": "randn",
    "swapaxes": "transpose",
    "transpose": "permute",
    "concat": "cat",
    "expand_dims": "unsqueeze",
    "tile": "repeat",
    "reduce_sum": "sum",
    "reduce_mean": "mean",
    "reduce_max": "amax",
    "reduce_min": "amin",
    "batch_matmul": "bmm",
    "cross_entropy_loss": "cross_entropy",
}

"""Functions of `mindspore.ops` and methods of its tensors. `mindspore.mint` has PyTorch's names already."""


@dataclass(frozen=True, slots=True)
class Primitive:
    """A primitive that computes what one of PyTorch's functions does, and where its tensors stand in that one's calls.

    `inputs` gives the place or keyword of each input, `gradients` the place of each input's gradient, in the order of
    the primitive; () where they stand in the same places. Only the first output is the function's.
    """

    function: str
    inputs: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()


MINDSPORE_PRIMITIVES = {
    "BatchNorm": Primitive("batch_norm", ("0", "weight", "bias", "1", "2"), ("0", "3", "4", "1", "2")),
    "Dense": Primitive("linear"),
    "ELU": Primitive("elu"),
    "GeLU": Primitive("gelu"),
    "LayerNorm": Primitive("layer_norm", ("0", "weight", "bias")),
    "LogSoftmax": Primitive("log_softmax"),
    "MaxPool": Primitive("max_pool2d"),
    "ReLU": Primitive("relu"),
    "Sigmoid": Primitive("sigmoid"),
    "SiLU": Primitive("silu"),
    "Softmax": Primitive("softmax"),
    "Softplus": Primitive("softplus"),
    "Tanh": Primitive("tanh"),
}
"""By class. Those that are only a part of a function (`MatMul` and `BiasAdd` are one `linear`) have no counterpart."""

MINDSPORE_PARAMETERS = {
    "gamma": "weight",
    "beta": "bias",
    "embedding_table": "weight",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
