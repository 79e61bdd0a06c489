"""Names of modules, found without a handle on the model.

A module's name is its path from the topmost module that holds it. Which one that is, is noted when modules are put
into each other (a registration hook), so `model.encoder(x)` called directly has the name it has inside the model.
The first topmost module that is called gives bare paths (`Module.blocks.0.fc1.Linear`), as msprobe does for one
model; further ones (a GAN's second network) put their class name in front. A name is free again when its module dies.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from msprobe_launch.records.names import NameTemplate


class ModuleInfo:
    """What is known of one module object: its names and whether its calls are ops of their own."""

    __slots__ = ("compiled", "expected", "gradients", "lazy", "module", "recorded", "template")

    def __init__(self, module: nn.Module, template: NameTemplate, recorded: bool) -> None:
        self.module = weakref.ref(module)
        self.template = template
        self.recorded = recorded  # False for the frame of the step: a topmost module that only holds others
        self.gradients = template.parameters_grad()
        self.expected: set[str] = set()  # parameters whose gradients are watched
        self.compiled = is_compiled(module)
        self.lazy = isinstance(module, LazyModuleMixin)


def is_compiled(module: nn.Module) -> bool:
    """True for what `torch.compile(module)` returns."""
    return type(module).__name__ == "OptimizedModule"


def class_name(module: nn.Module) -> str:
    """Class name as the user wrote it, which a compiled module, a lazy one and one under FSDP2 do not have."""
    kind = type(module)
    if kind.__name__ == "OptimizedModule":
        module = module._orig_mod
        kind = type(module)
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
        kind = module.cls_to_become
    if kind.__name__.startswith("FSDP") and any(base.__name__ == "FSDPModule" for base in kind.__mro__):
        for base in kind.__mro__[1:]:
            if base.__name__ != "FSDPModule" and issubclass(base, nn.Module):
                return base.__name__
    return kind.__name__


class ModuleNames:
    """Module object -> ModuleInfo, by identity. Modules that die leave nothing behind that could mislead."""

    def __init__(self) -> None:
        self._infos: dict[int, ModuleInfo] = {}
        self._holders: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = {}
        self._tops: list[tuple[weakref.ref[nn.Module], str]] = []
        self.holding: list[ModuleInfo] = []  # those with parameters of their own
        self._room = 1000  # for so many infos; then the gone ones go, of a program that makes modules in every step

    def held_by(self, holder: nn.Module, _name: str, module: Any) -> None:
        """Registration hook: `module` was put into `holder`. Returns None, which leaves it as it is."""
        if isinstance(module, nn.Module) and module is not holder:
            self._holders[id(module)] = (weakref.ref(module), weakref.ref(holder))

    def of(self, module: nn.Module) -> ModuleInfo:
        """The info of a module, scanning its topmost holder where it is not known yet."""
        info = self._infos.get(id(module))
        if info is not None and info.module() is module:
            return info
        top = self._topmost(module)
        self._scan(top)
        info = self._infos.get(id(module))
        if info is None or info.module() is not module:
            # Its holder keeps it out of sight (a plain list, a replaced attribute): it is a top of its own.
            self._scan(module)
            info = self._infos[id(module)]
        return info

    def name_top(self, module: nn.Module, prefix: str) -> None:
        """`module` is a topmost one, and `prefix` stands before the names in it."""
        self._tops.append((weakref.ref(module), prefix))
        self._scan(module)

    def _topmost(self, module: nn.Module) -> nn.Module:
        seen = {id(module)}
        while True:
            entry = self._holders.get(id(module))
            holder = entry[1]() if entry is not None and entry[0]() is module else None
            if holder is None or id(holder) in seen or not any(child is module for child in holder._modules.values()):
                return module
            seen.add(id(holder))
            module = holder

    def _scan(self, top: nn.Module) -> None:
        if len(self._infos) + len(self._holders) >= self._room:
            self._forget_gone()
        prefix = self._prefix(top)
        for path, module in top.named_modules(remove_duplicate=False):
            known = self._infos.get(id(module))
            if known is not None and known.module() is module:
                continue  # shared: the first name stays
            template = NameTemplate.of_module("Module", ".".join(p for p in (prefix, path) if p), class_name(module))
            frame = module is top and bool(module._modules) and not module._parameters and not is_compiled(module)
            info = self._infos[id(module)] = ModuleInfo(module, template, not frame)
            if module._parameters:
                self.holding.append(info)

    def _forget_gone(self) -> None:
        self._infos = {key: info for key, info in self._infos.items() if info.module() is not None}
        self._holders = {key: refs for key, refs in self._holders.items() if refs[0]() is not None}
        self.holding = [info for info in self.holding if info.module() is not None]
        self._room = 2 * (len(self._infos) + len(self._holders)) + 1000

    def _prefix(self, top: nn.Module) -> str:
        # A module made for one call (`CrossEntropyLoss()` inside a forward) leaves its name to its successor.
        self._tops = [entry for entry in self._tops if entry[0]() is not None]
        for known, prefix in self._tops:
            if known() is top:
                return prefix
        name = class_name(top)
        taken = {prefix for _, prefix in self._tops}
        prefix, number = ("" if not self._tops else name), 1
        while prefix in taken:
            prefix = f"{name}_{number}"
            number += 1
        self._tops.append((weakref.ref(top), prefix))
        return prefix
