"""The base of small objects that are made by the thousand in a recorded step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgspec import Struct as Light
else:
    try:
        from msgspec import Struct

        class Light(Struct, gc=False, eq=False):
            """Fields in slots, made in C, and not looked at by the garbage collector: none is part of a cycle."""

    except ImportError:  # a rank's environment may be leaner than ours
        from dataclasses import dataclass

        class Light:
            """The same without msgspec."""

            def __init_subclass__(cls) -> None:
                dataclass(eq=False)(cls)


__all__ = ["Light"]
