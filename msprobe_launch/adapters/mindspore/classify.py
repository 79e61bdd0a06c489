"""Which functions of MindSpore are APIs, what their prefix is in the field's names, and who calls them."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from typing import Any

from msprobe_launch.adapters.mindspore.runtime import Tensor

# Nothing is computed that training uses: questions, transformations of functions, registries, bookkeeping.
_NO_OPERATIONS = frozenset(
    """grad value_and_grad vjp jvp jacfwd jacrev vmap get_grad derivative jet linearize cond
    constexpr jit kernel ms_kernel custom_info_register op_info_register get_vm_impl_fn prim_arg_register
    prim_attr_register add_flags deepcopy is_tensor is_complex is_floating_point is_available is_initialized shape
    dyn_shape size rank numel print_ tensordump jit_forbidden_register jit_view_unsupported set_comm_ops_inplace
    silu_func hardtanh_op threshold_op reshard move_to""".split()
)

# The same of methods of Tensor.
_NO_METHODS = frozenset(
    """asnumpy numpy item itemset tolist data_sync is_pinned is_shared pin_memory get_bytes flush_from_cache is_init
    set_init_flag dim assign_value_cpp set_dtype offload offload_file_path move_to set_cast_dtype wait_pipeline
    is_contiguous is_complex is_signed is_floating_point stride storage_offset set_device_address hooks storage
    untyped_storage requires_grad_ to_dlpack set_ ndimension set_const_arg assign_value value register_hook nelement
    numel data_ptr init_data resize from_numpy type backward retain_grad dtype shape data
    delta_seed""".split()
)
_OPERATORS = frozenset(
    f"__{side}{name}__"
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
    for side in ("", "r", "i")
) | frozenset("__neg__ __invert__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __getitem__ __setitem__".split())

# Functions of all these modules that communicate are `Distributed.<name>`.
_COMMUNICATION = ("mindspore.mint.distributed", "mindspore.communication.comm_func", "mindspore.ops.communication")
_ALIASES = ("mindspore.ops", "mindspore.ops.functional")  # which hold some of them too
_NO_COMMUNICATION = frozenset(
    """get_rank get_world_size get_backend get_global_rank get_group_rank get_process_group_ranks new_group
    init_process_group destroy_process_group get_cache_group_size get_cache_group_rank restricted_loads
    is_available is_initialized set_comm_ops_inplace get_group_size""".split()
)
# (prefix, modules that hold the same functions)
_FUNCTIONS = (
    ("Functional", _ALIASES),
    ("Mint", ("mindspore.mint",)),
    ("Mint", ("mindspore.mint.linalg",)),
    ("Mint", ("mindspore.mint.special",)),
    ("MintFunctional", ("mindspore.mint.nn.functional",)),
)

_PLAIN = (types.FunctionType, types.BuiltinFunctionType)
_METHODS = (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def functions() -> Iterator[tuple[str, str, Any, tuple[Any, ...]]]:
    """(prefix, name, function, modules) of all functions that are recorded but for those that communicate."""
    communicate = {id(function) for _, function, _ in communications()}
    for prefix, names in _FUNCTIONS:
        modules = [importlib.import_module(name) for name in names]
        for name in dir(modules[0]):
            function = getattr(modules[0], name)
            if name.startswith("_") or name in _NO_OPERATIONS or not isinstance(function, _PLAIN):
                continue
            if id(function) not in communicate:
                holders = tuple(module for module in modules if getattr(module, name, None) is function)
                yield prefix, name, function, holders


def communications() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(name, function, modules) of all functions that communicate."""
    aliases = [importlib.import_module(name) for name in _ALIASES]
    for module in map(importlib.import_module, _COMMUNICATION):
        exported = getattr(module, "__all__", None) or dir(module)
        for name in exported:
            function = getattr(module, name, None)
            if name.startswith("_") or name in _NO_COMMUNICATION or not isinstance(function, types.FunctionType):
                continue
            yield name, function, tuple(m for m in (module, *aliases) if getattr(m, name, None) is function)


def methods() -> Iterator[tuple[str, Any]]:
    """(name, method) of all methods of Tensor that are recorded; parameters inherit them."""
    for name in sorted({name for kind in Tensor.__mro__ for name in vars(kind)}):
        if name in _NO_METHODS or (name.startswith("_") and name not in _OPERATORS):
            continue
        method = next(vars(kind)[name] for kind in Tensor.__mro__ if name in vars(kind))
        if isinstance(method, _METHODS):
            yield name, method


# Modules of MindSpore whose own calls are machinery and not the user's computation.
_MACHINERY = (
    "mindspore.common",
    "mindspore.dataset",
    "mindspore.train.callback",
    "mindspore.train.metrics",
    "mindspore.train.serialization",
    "mindspore.train.summary",
    "mindspore.train.data_sink",
    "mindspore.train.dataset_helper",
    "mindspore.nn.optim",
    "mindspore.experimental.optim",
    "mindspore.mint.optim",
    "mindspore.parallel",
    "mindspore.profiler",
    "mindspore.graph",
    "mindspore.nn.cell",
    "mindspore.communication",
    "msprobe_launch.",
)


def is_machinery(module: str) -> bool:
    """True for a module whose calls are not recorded; what communicates is recorded all the same."""
    return module.startswith(_MACHINERY)
