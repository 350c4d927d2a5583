"""Names to classes for algorithms, datasets and models.

A name is looked up in this order:

1. built-in classes, which register themselves with a decorator;
2. the workspace: ``--algo my_method`` finds ``./algorithms/my_method.py``, ``--dataset my_clinics``
   finds the folder ``./datasets/my_clinics/``;
3. installed packages, by entry points of the groups ``fedtopo_torch.algorithms``,
   ``fedtopo_torch.datasets`` and ``fedtopo_torch.models``;
4. a path: ``path/to/file.py:ClassName``, or a folder of CSV files for datasets. For models the
   class may be a plain ``torch.nn.Module``, see :class:`fedtopo_torch.models.module.ModuleModel`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from .options import OptionError, did_you_mean

__all__ = ["Registry", "UnknownName", "algorithms", "datasets", "models", "register"]

C = TypeVar("C", bound=type)


class UnknownName(OptionError):
    """A name that leads nowhere, or to a file or package that fails to import."""


class Registry(Generic[C]):
    """The classes of one kind, by name.

    Args:
        kind: what the classes are, for messages (``"algorithm"``); also the base class's name.
        package: the package whose import registers the built-in ones; also the entry-point group.
        base: where the base class of this kind is, ``"module:Class"``.
        files: the workspace folder searched for ``NAME.py``, relative to the current folder.
        folders: the workspace folder searched for folders called NAME, and
            ``"module:function"`` that makes a class of one.
        plain: where another class is that a file's class may be a subclass of, ``"module:Class"``,
            and ``"module:function"`` that makes a class of this kind of it and its full name.
    """

    def __init__(
        self,
        kind: str,
        package: str,
        base: str,
        *,
        files: str | None = None,
        folders: tuple[str, str] | None = None,
        plain: tuple[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.package = package
        self.files = files
        self._base = base
        self._folders = folders
        self._plain = plain
        self._classes: dict[str, C] = {}
        self._loaded: dict[Path, ModuleType] = {}
        self._from_files: dict[str, Path] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator: make the class available under ``name``.

        Raises:
            OptionError: the name is taken by another class.
        """

        def add(cls: C) -> C:
            base = _resolve(self._base)
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise OptionError(
                    f"'{name}' is registered as {self.kind}, but {cls!r} is no subclass of "
                    f"{base.__name__}."
                )
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
        """Names of the built-in classes and of those registered or installed beside them."""
        importlib.import_module(self.package)
        return iter(sorted({*self._classes, *self._installed()}))

    def __getitem__(self, name: str) -> C:
        """The class called ``name``.

        Raises:
            UnknownName: with the nearest known name, or why a file or package failed to import.
        """
        known = list(self)
        key = name.lower().replace("-", "_")
        path = None
        if self.files is not None and key.isidentifier():
            exact = Path(self.files, f"{name}.py")
            path = exact if name.isidentifier() and exact.is_file() else exact.with_stem(key)
        if key in self._classes and key not in self._from_files:
            if path is not None and path.is_file():
                raise UnknownName(f"{path} has the name of a built-in {self.kind}; rename it.")
            return self._classes[key]
        if path is not None and path.is_file():
            return self._from_file(path, path.stem)
        if key in self._classes:
            return self._classes[key]
        if self._folders is not None:
            for folder in (Path(self._folders[0], name), Path(name)):
                if name and folder.is_dir():
                    return _resolve(self._folders[1])(folder)
        if key in self._installed():
            return self._from_package(self._installed()[key])
        file, colon, attribute = name.rpartition(":")
        if colon and file.endswith(".py"):
            return self._from_file(Path(file), attribute)
        searched = f" (no file {path} in {Path.cwd()} either)" if path is not None else ""
        if self._folders is not None:
            searched = f" (no folder {self._folders[0]}/{name} in {Path.cwd()} either)"
        elif name.endswith(".py"):
            searched = f"; a class in a file is {name}:ClassName"
        raise UnknownName(
            f"there is no {self.kind} called '{name}'{searched}."
            + did_you_mean(name, {*known, *self.workspace()})
        )

    def workspace(self) -> dict[str, str]:
        """Name and place of what the workspace offers."""
        found = {}
        if self.files is not None and Path(self.files).is_dir():
            for path in sorted(Path(self.files).glob("*.py")):
                if path.stem.isidentifier():
                    found[path.stem] = str(path)
        if self._folders is not None and Path(self._folders[0]).is_dir():
            for path in sorted(Path(self._folders[0]).iterdir()):
                if path.is_dir() and any(path.glob("*.csv")):
                    found[path.name] = f"{path}/"
        return found

    def _installed(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.package)}

    def _from_file(self, path: Path, name: str) -> C:
        """A file's class: the one registered or called so, or its only one for ``NAME.py``."""
        if not path.is_file():
            raise UnknownName(f"there is no file {path}.")
        module = self._module(path)
        base = _resolve(self._base)
        plain = _resolve(self._plain[0]) if self._plain else base
        own: list[Any] = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, (base, plain))
            and value.__module__ == module.__name__
        ]
        fitting = [cls for cls in own if name in (vars(cls).get("name"), cls.__name__)]
        if not fitting and name == path.stem and len(own) == 1:
            fitting = own
        if not fitting:
            found = ", ".join(cls.__name__ for cls in own) or "no class"
            if self._plain:
                raise UnknownName(
                    f"{path} has no {self.kind} called '{name}': needed is a class of this name, a "
                    f"subclass of {plain.__module__.partition('.')[0]}'s {plain.__name__} or of "
                    f"{base.__module__}'s {base.__name__} (there: {found})."
                )
            raise UnknownName(
                f"{path} has no {self.kind} called '{name}': put @register(\"{name}\") above its "
                f"class (subclasses of {base.__name__} there: {found})."
            )
        if self._plain and not issubclass(fitting[0], base):
            made: C = _resolve(self._plain[1])(fitting[0], f"{path}:{name}")
            return made
        return _named(fitting[0], path.stem)

    def _from_package(self, point: EntryPoint) -> C:
        try:
            cls = point.load()
        except Exception as error:
            raise UnknownName(
                f"the {self.kind} '{point.name}' of entry point {point.value} fails to import: "
                f"{type(error).__name__}: {error}"
            ) from error
        base = _resolve(self._base)
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise UnknownName(
                f"entry point {point.value} is no {self.kind}: it is no subclass of "
                f"{base.__name__}."
            )
        return _named(cls, point.name)  # type: ignore[return-value]

    def _module(self, path: Path) -> ModuleType:
        place = path.resolve()
        if place in self._loaded:
            return self._loaded[place]
        # Names of files elsewhere with the same name give way: the workspace may have changed.
        for name, origin in list(self._from_files.items()):
            if origin.name == place.name and origin != place:
                self._classes.pop(name, None)
                del self._from_files[name]
                self._loaded.pop(origin, None)
        before = dict(self._classes)
        module_name = f"_workspace_{self.kind}_{place.stem}"
        spec = importlib.util.spec_from_file_location(module_name, place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and pickle look the module up by name
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[module_name]
            self._classes = before
            line = next(
                (
                    f", line {frame.lineno}"
                    for frame in reversed(traceback.extract_tb(error.__traceback__))
                    if Path(frame.filename).resolve() == place
                ),
                f", line {error.lineno}" if isinstance(error, SyntaxError) else "",
            )
            raise UnknownName(
                f"{path}{line} fails to import: {type(error).__name__}: {error}"
            ) from error
        self._loaded[place] = module
        for name in set(self._classes) - set(before):
            self._from_files[name] = place
        return module


def _named(cls: C, name: str) -> C:
    """Give a class the name it was found by, unless its decorator has given it one."""
    if "name" not in vars(cls):
        cls.name = name  # type: ignore[attr-defined]
    return cls


def _resolve(reference: str) -> Any:
    """What ``"module:attribute"`` names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


algorithms: Registry[Any] = Registry(
    "algorithm",
    "fedtopo_torch.algorithms",
    "fedtopo_torch.algorithms.base:Algorithm",
    files="algorithms",
)
datasets: Registry[Any] = Registry(
    "dataset",
    "fedtopo_torch.datasets",
    "fedtopo_torch.datasets.base:Dataset",
    folders=("datasets", "fedtopo_torch.datasets.folder:folder_dataset"),
)
models: Registry[Any] = Registry(
    "model",
    "fedtopo_torch.models",
    "fedtopo_torch.models.base:Model",
    plain=("torch.nn:Module", "fedtopo_torch.models.module:module_model"),
)

register = algorithms.register
