"""What is defined in a tree of sources, found by reading it: nothing is imported, so that trees of any release fit.

Places are dotted names as in :mod:`sglang_oscar.attach.touchpoints`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """One parsed file."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.body = ast.parse(path.read_text()).body

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """Statement by every name that the module binds, in branches at module level too.

        The last one counts; but a class that is made over into another kind of class is still what its body says.
        """
        found: dict[str, ast.stmt] = {}
        for statement in statements(self.body):
            for name in bound(statement):
                if not (isinstance(found.get(name), ast.ClassDef) and isinstance(statement, ast.Assign)):
                    found[name] = statement
        return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the branches in it, but not of its functions and classes."""
    for statement in body:
        yield statement
        for field in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With | ast.For):
                yield from statements(getattr(statement, field, []))
        for handler in getattr(statement, "handlers", []):
            yield from statements(handler.body)


def bound(statement: ast.stmt) -> list[str]:
    """Names that a statement binds."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)]


class SourceTree:
    """Args:
    root: the folder that holds the package, as on PYTHONPATH.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = cache(self._module)

    def _module(self, name: str) -> Module | None:
        path = self.root.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return Module(file, name)
        return None

    def has(self, place: str) -> bool:
        """Whether a dotted name is a module, or is bound in one, or in a class of one."""
        return self.module(place) is not None or self.find(place) is not None

    def find(self, place: str) -> ast.stmt | None:
        """The statement that binds a dotted name, followed through imports and base classes; None without one."""
        parts = place.split(".")
        for end in range(len(parts) - 1, 0, -1):
            module = self.module(".".join(parts[:end]))
            if module is not None:
                return self._within(module, parts[end:])
        return None

    def _within(self, module: Module, names: list[str]) -> ast.stmt | None:
        statement = module.names.get(names[0])
        if isinstance(statement, ast.ImportFrom):
            origin = self._imported(module, statement, names[0])
            return None if origin is None else self.find(".".join([origin, *names[1:]]))
        if statement is None:
            return next(filter(None, (self.find(".".join([star, *names])) for star in self._stars(module))), None)
        if len(names) == 1:
            return statement
        if not isinstance(statement, ast.ClassDef):
            return None
        for owner, definition in self.lineage(module, statement):
            for member in statements(definition.body):
                if names[1] in bound(member):
                    return member if len(names) == 2 else self._within(owner, names[1:])
        return None

    @staticmethod
    def _origin(module: Module, statement: ast.ImportFrom) -> str:
        """The module that a statement imports from."""
        parts = module.package.split(".")
        base = parts[: len(parts) - statement.level + 1] if statement.level else []
        return ".".join([*base, *filter(None, [statement.module])])

    def _imported(self, module: Module, statement: ast.ImportFrom, name: str) -> str | None:
        original = next((a.name for a in statement.names if (a.asname or a.name) == name), None)
        return None if original is None else f"{self._origin(module, statement)}.{original}"

    def _stars(self, module: Module) -> list[str]:
        """Modules that a module imports all names of."""
        imports = [statement for statement in statements(module.body) if isinstance(statement, ast.ImportFrom)]
        return [self._origin(module, one) for one in imports if any(alias.name == "*" for alias in one.names)]

    def lineage(self, module: Module, definition: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
        """A class and its base classes as far as they are in the tree, nearest first."""
        yield module, definition
        for base in definition.bases:
            found = self.locate(module, ast.unparse(base))
            if found is not None:
                yield from self.lineage(*found)

    def locate(self, module: Module, name: str) -> tuple[Module, ast.ClassDef] | None:
        """The class that a name means in a module."""
        statement = module.names.get(name)
        if isinstance(statement, ast.ClassDef):
            return module, statement
        if isinstance(statement, ast.ImportFrom):
            origin = self._imported(module, statement, name)
            place, _, original = (origin or "").rpartition(".")
            source = self.module(place) if place else None
            return None if source is None else self.locate(source, original)
        return None

    def attributes(self, place: str) -> set[str]:
        """Names of a class that its objects have: fields, methods, and what methods assign to ``self``.

        Raises:
            KeyError: there is no such class.
        """
        owner, _, name = place.rpartition(".")
        module = self.module(owner)
        found = None if module is None else self.locate(module, name)
        if found is None:
            raise KeyError(f"{self.root.name} has no class {place}")
        names: set[str] = set()
        for _, definition in self.lineage(*found):
            for member in statements(definition.body):
                names.update(bound(member))
                if isinstance(member, FUNCTION):
                    names.update(assigned_to_self(member))
        return names

    def parameters(self, place: str) -> list[str]:
        """Names of a function's parameters; of a class those of its ``__init__``, or its fields.

        Raises:
            KeyError: there is no such function.
        """
        statement = self.find(place)
        if isinstance(statement, ast.ClassDef):
            made = self.find(f"{place}.__init__")
            return (
                self.parameters(f"{place}.__init__") if isinstance(made, FUNCTION) else sorted(self.attributes(place))
            )
        if not isinstance(statement, FUNCTION):
            raise KeyError(f"{self.root.name} has no function {place}")
        arguments = statement.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return [argument.arg for argument in [*listed, *filter(None, [arguments.vararg, arguments.kwarg])]]


def assigned_to_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Attributes that a method assigns to its first parameter."""
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for part in ast.walk(target) if isinstance(target, ast.AST) else ():
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    yield part.attr
