"""Torch functions -> the field's API names, and which of them are no operations at all."""

from __future__ import annotations

import dis
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from msprobe_launch.records.names import NameTemplate

# Questions about a tensor, conversions to Python, hooks and bookkeeping: nothing is computed that training uses.
_NO_OPERATIONS = frozenset(
    """__get__ __set__ __delete__ __len__ __repr__ __format__ __str__ __bool__ __int__ __float__ __complex__ __index__
    __contains__ __hash__ __iter__ __deepcopy__ __reduce_ex__ __reduce__ __setstate__ __dir__ __array__ __array_wrap__
    __cuda_array_interface__ __dlpack__ __dlpack_device__ __reversed__
    size dim numel nelement ndimension stride storage_offset element_size is_contiguous is_floating_point is_complex
    is_signed is_inference is_nonzero is_same_size is_set_to is_shared is_pinned is_conj is_neg is_coalesced is_leaf
    data_ptr storage untyped_storage _typed_storage get_device device type qscheme has_names
    item tolist numpy requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook
    backward grad _backward_hooks _is_view _is_zerotensor _set_grad_enabled
    _record_function_enter_new _record_function_exit _record_function_enter _nested_tensor_size is_tensor is_storage
    get_default_dtype is_grad_enabled is_autocast_enabled result_type can_cast promote_types
    sym_int sym_float sym_not is_vulkan_available _assert _assert_async broadcast_shapes""".split()
)

_DISTRIBUTED_ALIASES = {
    # torch 2.13's new names; the field's files have the old ones
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}

# method that Python calls for an operator -> operator text of the byte code -> name as msprobe writes it
_OPERATORS = {
    "add": {"+": "__add__"},
    "add_": {"+=": "__iadd__"},
    "sub": {"-": "__sub__"},
    "sub_": {"-=": "__isub__"},
    "mul": {"*": "__mul__"},
    "mul_": {"*=": "__imul__"},
    "div": {"/": "__truediv__"},
    "div_": {"/=": "__itruediv__"},
    "matmul": {"@": "__matmul__"},
    "pow": {"**": "__pow__"},
    "neg": {"neg": "__neg__"},
    "abs": {},
    "gt": {">": "__gt__"},
    "lt": {"<": "__lt__"},
    "ge": {">=": "__ge__"},
    "le": {"<=": "__le__"},
    "eq": {"==": "__eq__"},
    "ne": {"!=": "__ne__"},
    "remainder": {"%": "__mod__"},
}
_UNARY = {"UNARY_NEGATIVE": "neg"}
_OLD_BINARY = {  # Python 3.10 has one opcode per operator
    "ADD": "+",
    "SUBTRACT": "-",
    "MULTIPLY": "*",
    "TRUE_DIVIDE": "/",
    "MATRIX_MULTIPLY": "@",
    "POWER": "**",
    "MODULO": "%",
}


def api_name(function: Any) -> tuple[str, str] | None:
    """(prefix, name) of a function as a torch-function mode receives it; None where it is no operation."""
    name = getattr(function, "__name__", None)
    if name is None or name in _NO_OPERATIONS:
        return None
    if isinstance(function, torch._ops.OpOverload):
        namespace, _, base = function._schema.name.partition("::")
        return None if namespace == "profiler" else (_namespace(namespace), base)
    module = getattr(function, "__module__", None) or ""
    if module.startswith("torch._ops."):
        namespace = module.split(".")[2]
        return None if namespace == "profiler" else (_namespace(namespace), name)
    owner = getattr(function, "__objclass__", None)
    if (owner is not None and issubclass(Tensor, owner)) or getattr(function, "__qualname__", "").startswith(
        ("Tensor.", "TensorBase.")
    ):
        return "Tensor", name
    if module.startswith(("torch._C._nn", "torch.nn.functional")):
        return "Functional", name
    if module.startswith("torch.distributed"):
        return "Distributed", _DISTRIBUTED_ALIASES.get(name, name)
    for family in ("linalg", "fft", "special", "sparse"):
        if module == f"torch._C._{family}":
            return "Torch", name.removeprefix(f"{family}_")
    return "Torch", name


def _namespace(namespace: str) -> str:
    return "Aten" if namespace == "aten" else namespace.capitalize()


class OperatorNames:
    """The name of an operator as it stands in the source: `a + b` arrives as `Tensor.add`, msprobe has `__add__`.

    Read off the caller's byte code, once per position. `2 * a` cannot be told from `a * 2`.
    """

    def __init__(self) -> None:
        # Code by identity, kept alive beside its template: its own hash reads all its constants.
        self._templates: dict[tuple[int, int, str], tuple[NameTemplate | None, CodeType]] = {}

    def of(self, code: CodeType, position: int, name: str) -> NameTemplate | None:
        """Template of the operator at this position of the caller's code, or None where it is a plain call."""
        key = (id(code), position, name)
        try:
            return self._templates[key][0]
        except KeyError:
            operator = _OPERATORS[name].get(_operator_at(code, position))
            template = NameTemplate.of_api("Tensor", operator) if operator else None
            self._templates[key] = (template, code)
            return template


def is_operator(name: str) -> bool:
    """True for methods that an operator may stand behind."""
    return name in _OPERATORS


def _operator_at(code: CodeType, position: int) -> str:
    instruction = next((i for i in dis.get_instructions(code) if i.offset == position), None)
    if instruction is None:
        return ""
    opname = instruction.opname
    if opname == "BINARY_OP":
        return instruction.argrepr
    if opname == "COMPARE_OP":
        return instruction.argrepr.removeprefix("bool(").removesuffix(")")
    if opname in _UNARY:
        return _UNARY[opname]
    kind, _, rest = opname.partition("_")
    if kind in ("BINARY", "INPLACE") and rest in _OLD_BINARY:
        return _OLD_BINARY[rest] + ("=" if kind == "INPLACE" else "")
    return ""
