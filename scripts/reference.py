"""Write docs/reference.md from what the code says of its flags, variables, refusals, metrics and facts.

python scripts/reference.py            # writes the page
python scripts/reference.py --check    # exit status 1 if the page differs
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from oscar_rotation.files import zoo
from oscar_tools import local_server
from oscar_tools.evaluation import harness
from sglang_oscar import metrics
from sglang_oscar.attach import flags, known_arguments, refusals
from sglang_oscar.features import register_all
from sglang_oscar.features.recording.dump_hook import DumpSettings
from sglang_oscar.memory.facts import FACTS
from sglang_oscar.settings import PREFIXES, UNSET, Settings

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
HEAD = """# Reference

`python scripts/reference.py` writes this page from the code; a test compares the two.

`--kv-cache-dtype int2` and two rotation files switch int2 mode on; `Engine(kv_cache_dtype="int2", ...)` likewise. A
server prints all values at start, in the lines `int2 settings:` and `int2 memory:`. Programs of SGLang that are no
servers, such as its benchmarks, load no plugins: start them with `oscar run MODULE ...`. Without a GPU, for tests, set
`SGLANG_USE_CPU_ENGINE=1`, pass `--device cpu`, and put `python/oscar_cpu/stand_in` on `PYTHONPATH` where `libcuda` is
missing.
"""
SERVER = f"""Of a server in int2 mode. Another variable that begins with one of
{", ".join(f"`{name}`" for name in PREFIXES)} is refused."""
DUMP = """Of an ordinary server that records for a fit, without `--kv-cache-dtype int2`. It serves without prefix cache
and prefill CUDA graphs, and records sequences from position 0: of a prompt longer than `--chunked-prefill-size` its
first chunk."""
TOOLS = """Options of `oscar` that have a variable name it in `oscar COMMAND --help`; variables of a script are in its
first lines. Besides:"""
TOOL_VARIABLES = {
    local_server.START_VARIABLE: f"seconds that a server may take to start; {local_server.START_TIMEOUT:.0f}",
    harness.PYTHON_VARIABLE: "interpreter that has the harness of `oscar eval`; this one",
    zoo.REPO_VARIABLE: "repository of rotation files that `oscar zoo` reads; none",
}
REFUSED = """A server that is started with one of these ends with this line and exit status 78, before it loads the
model; what only layers of a model tell, while it loads. Behind the semicolon is what to change;
models that are refused need `--kv-cache-dtype auto`. Values of settings that are refused are in
[troubleshooting.md](troubleshooting.md#settings)."""
ARGUMENTS = """Of SGLang's server arguments {tried} have been served with int2 off their default, {refused} are refused,
or some of their values are, {no bearing} have no bearing on a cache, {not served} belong to what is refused, and {not
tried} nobody has tried. Those are not refused: a server names them at start (`int2 mode: untried arguments: ...`).
`python/sglang_oscar/attach/known_arguments.py` lists all."""


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table whose cells are one line each."""
    lines = [f"| {' | '.join(' '.join(cell.split()) for cell in line)} |\n" for line in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|\n")
    return "\n" + "".join(lines)


def section(title: str, *parts: str) -> str:
    """A heading, and what is below it: tables and paragraphs, which are filled to the width of a page."""
    filled = [
        part if part.startswith("\n") else f"\n{textwrap.fill(part, 120, break_on_hyphens=False)}\n" for part in parts
    ]
    return f"\n## {title}\n" + "".join(filled)


def code(text: str) -> str:
    """Flags, with the names they are set to, and variables as code."""
    taken = re.sub(r"(--[a-z0-9-]+(?: (?!or|and|to\b)[a-z0-9_]+(?=$|[;,:]))?)", r"`\1`", text)
    return re.sub(r"\b(SGLANG_[A-Z_]+)", r"`\1`", taken)


def literals(hint: Any) -> tuple[Any, ...]:
    """What a type with a Literal somewhere in it admits."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(value for part in get_args(hint) for value in literals(part))


def values(field: Any) -> str:
    """What a setting may be."""
    if field.annotation is bool:
        return "0, 1"
    if found := literals(field.annotation):
        return ", ".join(map(str, found))
    bounds = {name: getattr(x, name) for x in field.metadata for name in ("gt", "ge", "le") if hasattr(x, name)}
    if "ge" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    return ", ".join(f"{sign} {bounds[name]}" for name, sign in (("gt", ">"), ("le", "at most")) if name in bounds)


def variables(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """A row for every setting.

    Raises:
        ValueError: one has no description.
    """
    for name, field in model.model_fields.items():
        if not field.description:
            raise ValueError(f"{model.__name__}.{name} has no description")
        default = field.default
        shown = (
            UNSET.get(name, "(required)")
            if default is None
            else str(int(default) if isinstance(default, bool) else default)
        )
        yield f"`{field.alias}`", values(field) or "-", shown.strip("()"), field.description


def refused() -> Iterator[str]:
    """A list for every kind of thing that is refused, as the server says it."""
    for title, lines in refusals.rows().items():
        yield f"\n### {title}\n\n" + "".join(f"* {code(line)}\n" for line in lines)


def published() -> Iterator[tuple[str, str]]:
    """A row for every metric."""
    yield from ((f"`{metrics.PREFIX}{name}_total`", text) for name, text in metrics.COUNTED.items())
    yield from ((f"`{metrics.PREFIX}{name}`", text) for name, text in (metrics.GAUGES | metrics.LAYERS).items())


def page() -> str:
    """The text of the page."""
    register_all()
    counts = {group: len(names) for group, names in known_arguments.GROUPS.items()}
    heads = ("variable", "values", "default", "meaning")
    parts = [
        HEAD,
        section(
            "Flags of a server", table(("flag", "meaning"), ((f"`{k}`", code(v)) for k, v in flags.MEANINGS.items()))
        ),
        section("Variables of a server", SERVER, table(heads, variables(Settings))),
        section("Variables of a dump", DUMP, table(heads, variables(DumpSettings))),
        section(
            "Variables of tools",
            TOOLS,
            table(("variable", "meaning; default"), ((f"`{k}`", v) for k, v in TOOL_VARIABLES.items())),
        ),
        section("Metrics", "With `--enable-metrics`, with SGLang's labels.", table(("metric", "meaning"), published())),
        section(
            "What /server_info says",
            "In `internal_states[replica].oscar`, and as labels of `sglang:oscar_cache_info`.",
            table(("fact", "meaning"), ((f"`{name}`", text) for name, text in FACTS.items())),
        ),
        section("Refused", REFUSED, *refused()),
        section("Arguments of SGLang", ARGUMENTS.replace("\n", " ").format(**counts)),
    ]
    return "".join(parts)


def main() -> int:
    """Write the page, or compare it; the exit status."""
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is not what the code says; run python scripts/reference.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
