"""Run an action as soon as torch, or another module, is imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def after_torch(action: Callable[[], None]) -> None:
    """Call `action` now if torch is imported, else right after its import, in the same thread."""
    after_import("torch", action)


def after_import(name: str, action: Callable[[], None]) -> None:
    """Call `action` now if the module `name` is imported, else right after its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Leaves finding a module to the others, and has its loader call `action` at the end."""

    def __init__(self, name: str, action: Callable[[], None]):
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # find_spec below must not come here again
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            # nothing to import yet: the next attempt may find it
            sys.meta_path.insert(0, self)
            return spec
        spec.loader = _ThenLoader(spec.loader, self._action)
        return spec


class _ThenLoader(Loader):
    def __init__(self, loader: Loader, action: Callable[[], None]):
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # code that asks the module for its loader must get its own
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action()
