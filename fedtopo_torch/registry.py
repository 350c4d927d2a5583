"""Names to classes for algorithms, datasets and models.

Built-in classes register themselves with a decorator. A name that is not built in is looked up in
the workspace: ``--algo my_method`` finds ``./algorithms/my_method.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from .options import OptionError, Options, did_you_mean

__all__ = ["Registry", "UnknownName", "algorithms", "datasets", "models", "register"]

C = TypeVar("C", bound=type)


class UnknownName(OptionError):
    """A name that is neither built in nor in the workspace, or a workspace file that fails."""


class Registry(Generic[C]):
    """The classes of one kind, by name.

    Args:
        kind: what the classes are, for messages (``"algorithm"``).
        package: the package whose import registers the built-in ones.
        folder: the workspace folder searched for ``NAME.py``, relative to the current folder;
            ``None`` when this kind has no plain Python files.
    """

    def __init__(self, kind: str, package: str, folder: str | None = None) -> None:
        self.kind = kind
        self.package = package
        self.folder = folder
        self._classes: dict[str, C] = {}
        self._files: dict[str, Path] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator: make the class available under ``name``.

        Raises:
            OptionError: the name is taken by another class.
        """

        def add(cls: C) -> C:
            known = self._classes.get(name)
            # A module imported again (a reload, a test) may replace its own class.
            if known is not None and (known.__module__, known.__qualname__) != (
                cls.__module__,
                cls.__qualname__,
            ):
                raise OptionError(
                    f"the {self.kind} name '{name}' is taken by "
                    f"{known.__module__}.{known.__qualname__}; choose another."
                )
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return add

    def __iter__(self) -> Iterator[str]:
        importlib.import_module(self.package)
        return iter(sorted(self._classes))

    def __getitem__(self, name: str) -> C:
        """The class called ``name``.

        Raises:
            UnknownName: with the nearest known name, or why the workspace file failed to import.
        """
        known = list(self)
        key = name.lower().replace("-", "_")
        path = Path(self.folder, f"{key}.py").resolve() if self.folder else None
        loaded = self._files.get(key)
        if path is not None and path.is_file() and (key not in self._classes or loaded):
            # The same name in another workspace is another method.
            if loaded == path:
                return self._classes[key]
            self._classes.pop(key, None)
            return self._from_file(key, path)
        if key in self._classes:
            return self._classes[key]
        where = f" (no file {self.folder}/{key}.py either)" if path is not None else ""
        raise UnknownName(
            f"there is no {self.kind} called '{name}'{where}."
            + did_you_mean(name, {*known, *self.workspace()})
        )

    def workspace(self) -> list[str]:
        """Names of the Python files in the workspace folder."""
        if self.folder is None or not Path(self.folder).is_dir():
            return []
        return sorted(p.stem for p in Path(self.folder).glob("*.py") if p.stem.isidentifier())

    def _from_file(self, name: str, path: Path) -> C:
        module_name = f"_workspace_{self.kind}_{name}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickles look the module up by name
        before = set(self._classes)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            for added in set(self._classes) - before:
                del self._classes[added]
            line = next(
                (
                    f", line {frame.lineno}"
                    for frame in reversed(traceback.extract_tb(error.__traceback__))
                    if Path(frame.filename).resolve() == path
                ),
                f", line {error.lineno}" if isinstance(error, SyntaxError) else "",
            )
            raise UnknownName(
                f"{self.folder}/{path.name}{line} fails to import: {type(error).__name__}: {error}"
            ) from error
        shown = f"{self.folder}/{path.name}"
        if name not in self._classes:
            own = [
                value
                for value in vars(module).values()
                if isinstance(value, type)
                and issubclass(value, Options)
                and value.__module__ == module_name
            ]
            if len(own) != 1:
                raise UnknownName(
                    f"{shown} registers no {self.kind} called '{name}': put @register(\"{name}\") "
                    f"above its class (found: {', '.join(c.__name__ for c in own) or 'no class'})."
                )
            self.register(name)(own[0])  # type: ignore[arg-type]
        self._files[name] = path
        return self._classes[name]


algorithms: Registry[Any] = Registry("algorithm", "fedtopo_torch.algorithms", "algorithms")
datasets: Registry[Any] = Registry("dataset", "fedtopo_torch.datasets")
models: Registry[Any] = Registry("model", "fedtopo_torch.models")

register = algorithms.register
