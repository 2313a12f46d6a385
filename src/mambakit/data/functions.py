"""Keys of a person's own functions: a hash of the code and of all that it uses, the same in every process.

Work that was done with a function is used again while its key stays the same. The key covers default arguments, values
that the function closes over or is bound to, and the global functions, values and modules that it names, with all that
those use. Some values, such as an object of a library, cannot be described: then the work is done again.
"""

from __future__ import annotations

import abc
import dataclasses
import dis
import enum
import functools
import hashlib
import logging
import operator
import os
import re
import secrets
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, Generic, Protocol

import numpy as np

from ..progress import say

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...), type(NotImplemented))
CONTAINERS = (tuple, list, dict, set, frozenset)
# Classes that add no state to objects of a person's own class.
STATELESS = (object, abc.ABC, Generic, Protocol, *CONTAINERS)
# Attributes of a class that its objects do not depend on.
UNUSED = "__doc__ __module__ __dict__ __weakref__ __annotations__ _abc_impl __dataclass_fields__ __dataclass_params__"
CACHED = type(functools.cache(len))


class UnknownValueError(Exception):
    """A value that cannot be described so that another process describes it the same."""


def function_key(function: Callable[..., Any]) -> str:
    """The key of a function. A function that cannot be described has a new key each time."""
    try:
        return describe(function)
    except (UnknownValueError, RecursionError) as problem:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        say(f"{name} uses {problem}, which may have changed since: work that was done with it before is done again")
        return secrets.token_hex(16)


def describe(function: Callable[..., Any]) -> str:
    """A hash that is the same in every process while the function stays the same."""
    return hashlib.sha256(repr(_Descriptions().of(function)).encode("utf-8", "surrogatepass")).hexdigest()


class _Descriptions:
    """Describes values. Each is described once, because functions may call each other."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.alive: list[Any] = []  # keeps the objects, so that no id is used again

    def of(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return type(value).__name__, repr(value)
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        self.alive.append(value)
        return type(value).__qualname__, self._content(value)

    def _content(self, value: Any) -> Any:
        match value:
            case enum.Enum():
                return self.of(type(value)), value.name
            case tuple() | list():
                return self._state(value), [self.of(one) for one in value]
            case dict():
                return self._state(value), [(self.of(key), self.of(one)) for key, one in value.items()]
            case set() | frozenset():
                # Each by itself and sorted: the order of a set differs from process to process.
                return self._state(value), sorted(repr(_Descriptions().of(one)) for one in value)
            case bytearray() | PurePath():
                return repr(value)
            case re.Pattern():
                return repr(value.pattern), value.flags
            case logging.Logger():
                return value.name
            case operator.itemgetter() | operator.attrgetter() | operator.methodcaller():
                return self.of(value.__reduce__()[1])
            case np.ndarray() if value.dtype != object:
                return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
            case np.generic() if value.dtype != object:
                return value.dtype.str, value.tobytes()
            case types.CodeType():
                return value.co_code, value.co_names, value.co_varnames, [self.of(one) for one in value.co_consts]
            case functools.partial():
                return self.of(value.func), self.of(value.args), self.of(value.keywords)
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return self.of(value.__func__), self.of(value.__self__)
            case types.BuiltinFunctionType() if isinstance(value.__self__, types.ModuleType | type(None)):
                return _place(value)
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                return value.__qualname__, self.of(value.__self__)
            case types.MethodDescriptorType() | types.WrapperDescriptorType():
                return _place(value.__objclass__), value.__name__
            case staticmethod() | classmethod():
                return self.of(value.__func__)
            case functools.cached_property():
                return self.of(value.func)
            case property():
                return [self.of(part) for part in (value.fget, value.fset, value.fdel)]
            case types.ModuleType():
                return self._module(value)
            case type():
                return self._class(value)
        if isinstance(value, CACHED):
            return self.of(value.__wrapped__)
        if type(value).__module__ == "dataclasses" and not isinstance(value, dataclasses.Field):  # such as MISSING
            return None
        return self._state(value)

    def _function(self, function: types.FunctionType) -> Any:
        """Its code, and what that uses; of a library's function, its place. Both may hold values of a person's own."""
        parts = (function.__defaults__, function.__kwdefaults__, vars(function), *_cells(function))
        held = [self.of(part) for part in parts]
        home = function.__globals__.get("__name__")  # __module__ is that of the function which it wraps
        if _is_installed(home):
            return _place(function), function.__code__.co_name, held
        used = [
            (name, self.of(function.__globals__[name]))
            for name in sorted(_global_names(function.__code__))
            if name in function.__globals__
        ]
        return function.__qualname__, self.of(function.__code__), held, used

    def _class(self, kind: type) -> Any:
        if _is_installed(kind.__module__):
            return _place(kind)
        own = {
            name: value
            for name, value in vars(kind).items()
            if not isinstance(value, types.GetSetDescriptorType | types.MemberDescriptorType)
            and name not in UNUSED.split()
        }
        return kind.__qualname__, [self.of(base) for base in kind.__bases__], self.of(own)

    def _state(self, value: Any) -> Any:
        """The attributes of an object of a person's own class; None for a plain list, dictionary or set."""
        kind = type(value)
        if kind in CONTAINERS:
            return None
        for base in kind.__mro__:
            if _is_installed(base.__module__) and base not in STATELESS:
                raise UnknownValueError(f"an object of {base.__module__}.{base.__qualname__}")
        slots = [name for base in kind.__mro__ for name in _slots(base) if hasattr(value, name)]
        return self.of(kind), self.of({**getattr(value, "__dict__", {}), **{n: getattr(value, n) for n in slots}})

    def _module(self, module: types.ModuleType) -> Any:
        """Of an installed module, its version; of a person's own, its file and those of the modules that it uses."""
        if _is_installed(module.__name__):
            return _place(module)
        if not (file := getattr(module, "__file__", None)) or not Path(file).is_file():
            raise UnknownValueError(f"the module {module.__name__}")
        others = {
            one.__name__ if isinstance(one, types.ModuleType) else str(getattr(one, "__module__", ""))
            for one in vars(module).values()
            if isinstance(one, types.ModuleType | types.FunctionType | type)
        } - {module.__name__}
        own = [sys.modules[name] for name in sorted(others) if name in sys.modules and not _is_installed(name)]
        return module.__name__, hashlib.sha256(Path(file).read_bytes()).hexdigest(), [self.of(one) for one in own]


def _cells(function: types.FunctionType) -> list[Any]:
    """Values that a function closes over; None for one that is not set yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def _global_names(code: types.CodeType) -> set[str]:
    """The global names that a function uses, with those of the functions inside it."""
    here = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return here.union(*(_global_names(one) for one in code.co_consts if isinstance(one, types.CodeType)))


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _place(value: Any) -> Any:
    """The place of something installed, and its version."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or "builtins"
    version = getattr(sys.modules.get(str(name).partition(".")[0]), "__version__", None)
    return str(name), getattr(value, "__qualname__", ""), str(version)


def _is_installed(name: str | None) -> bool:
    """Whether a module comes with Python or from an installed package, and not from a person's own files."""
    if name is None or (top := name.partition(".")[0]) in (__package__.partition(".")[0], "builtins"):
        return True
    if name == "__main__":
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names
    return bool(os.path.realpath(file).startswith(_installed_places()))


@functools.cache
def _installed_places() -> tuple[str, ...]:
    places = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return tuple(os.path.realpath(place) + os.sep for place in places if place)
