"""The report of a reproduction: tables and figures in files, report.md and one report.html."""

from __future__ import annotations

import base64
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from importlib.metadata import version
from pathlib import Path

from .. import __version__
from ..paper import CITED, entry
from ..report import write_tables, writing
from ..runs import write_atomically
from ..tables import Column, Table, text_cell
from . import CATALOGUE
from .reproduction import Reproduction, Section

__all__ = ["page", "write_reproduction"]

_MEANINGS = {
    "rounds": "communication rounds T",
    "local_steps": "local gradient steps tau",
    "eta": "step size; auto is 1 / max_k L_k",
    "l2": "lambda, on all parameters",
    "n_clusters": "clusters M",
    "abar": "target effective blending",
}


@dataclass(frozen=True)
class _Written:
    """A section whose files are written: what of its figures the pages need, by name."""

    section: Section
    svg: dict[str, bytes]


def write_reproduction(done: Reproduction, folder: Path, command: Sequence[str]) -> list[Path]:
    """Write everything that is known of a reproduction.

    Per experiment a folder of its name with ``tables.md``, ``.tex``, ``.json`` and one CSV file per
    table, and figures as PNG and SVG; ``report.md``; and ``report.html``, which holds tables and
    figures itself and asks nothing of a network; of some experiments only, these two are called
    ``report-table3-figure4`` and so on. Each file all of it or nothing.

    Args:
        done: not interrupted.
        folder: exists.
        command: that made it, for the head of the report.

    Returns:
        the files; the two reports last.

    Raises:
        RunFolderError: one of them can't be written.
        ValueError: it was interrupted.
    """
    from ..figures import save_figure

    files: list[Path] = []
    written = []
    with writing(folder):
        for section in done.sections:
            own = folder / section.name
            own.mkdir(exist_ok=True)
            files += write_tables(section.tables, own)
            svg = {}
            for name, figure in section.figures.items():
                png, vector = save_figure(figure, own / name)
                files += [png, vector]
                svg[name] = vector.read_bytes()
            written.append(_Written(section, svg))
        head = _facts(done, command)
        failures = done.failures_table()
        # Some experiments must not take the place of the report of all.
        names = [section.name for section in done.sections]
        stem = "report" if set(names) == set(CATALOGUE) else f"report-{'-'.join(names)}"
        for name, text in (
            (f"{stem}.md", _markdown(written, head, failures)),
            (f"{stem}.html", page(written, head, failures)),
        ):
            files.append(folder / name)
            write_atomically(files[-1], text.encode())
    return files


def _facts(done: Reproduction, command: Sequence[str]) -> dict[str, str]:
    """What a reader must know of how this was made."""
    seeds, packages = done.settings.seeds, ("torch", "numpy", "scipy", "scikit-learn", "gudhi")
    consecutive = len(seeds) > 1 and seeds == tuple(range(seeds[0], seeds[-1] + 1))
    outcomes = len(done.execution.outcomes)
    others = done.settings.others()
    facts = {
        "Command": shlex.join(command),
        "Date": date.today().isoformat(),
        "Machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{done.execution.processes} processes",
        "Versions": ", ".join(
            [
                f"fedtopo-torch {__version__}",
                f"Python {platform.python_version()}",
                *(f"{name} {version(name)}" for name in packages),
            ]
        ),
        "Seeds": f"{seeds[0]} to {seeds[-1]}" if consecutive else ", ".join(map(str, seeds)),
        "Run": f"{outcomes} trainings and measurements ({done.stored} of them kept from before), "
        f"{done.execution.seconds:.0f} s",
        "Paper": CITED,
    }
    if others:
        facts["Not the paper's settings"] = ", ".join(others)
    return facts


def _settings_table() -> Table:
    """The paper's Table 5."""
    rows = tuple(
        tuple(text_cell(str(text)) for text in (_MEANINGS[name], value))
        for name, value in entry("table5").items()
    )
    columns = (Column("setting", ("setting",), number=False), Column("value", ("value",)))
    return Table("Settings of all experiments, where nothing else is said (Table 5)", columns, rows)


def _called(section: Section) -> str:
    kind, number = section.name[:-1], section.name[-1]
    return f"{kind.capitalize()} {number}: {section.title}"


def _markdown(written: Sequence[_Written], head: dict[str, str], failures: Table | None) -> str:
    lines = ["# The paper's experiments, run again", ""]
    lines += [f"- {name}: {text}" for name, text in head.items()]
    lines += ["", _settings_table().markdown()]
    for each in written:
        section = each.section
        lines += [f"## {_called(section)}", "", section.question, ""]
        lines += [f"- {sentence}" for sentence in section.findings]
        for table in section.tables:
            lines += ["", table.markdown().rstrip()]
        for name in each.svg:
            lines += ["", f"![{_called(section)}]({section.name}/{name}.svg)"]
        lines.append("")
    if failures is not None:
        lines += ["## Failures", "", failures.markdown()]
    return "\n".join(lines).rstrip() + "\n"


_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem;
  margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.3rem; margin-top: 2.5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
nav ol { columns: 18rem; }
figure { margin: 1.2rem 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; vertical-align: bottom; }
.number { text-align: right; } td.number { white-space: nowrap; }
.note { color: #555; font-size: .85rem; margin: .3rem 0; }
img { max-width: 100%; height: auto; }
@media (max-width: 40rem) { body { padding: .6rem; } dl { grid-template-columns: 1fr; }
  th, td { padding: .15rem .35rem; } }
@media print { body { max-width: none; font-size: 10pt; } .scroll { overflow: visible; }
  h2 { break-after: avoid; } tr, img { break-inside: avoid; } table { font-size: 7.5pt; } }
"""


def page(written: Sequence[_Written], head: dict[str, str], failures: Table | None) -> str:
    """The whole report as one page that needs nothing else."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>pTopoFL: the paper's experiments</title>\n<style>{_STYLE}</style>",
        "</head>\n<body>",
        "<h1>The paper's experiments, run again</h1>\n<dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in head.items()),
        "</dl>\n<nav><ol>",
        *(
            f'<li><a href="#{each.section.name}">{escape(_called(each.section))}</a></li>'
            for each in written
        ),
        "</ol></nav>",
        _settings_table().html(),
    ]
    for each in written:
        section = each.section
        parts.append(f'<section id="{section.name}">\n<h2>{escape(_called(section))}</h2>')
        parts.append(f"<p>{escape(section.question)}</p>\n<ul>")
        parts += [f"<li>{escape(sentence)}</li>" for sentence in section.findings]
        parts.append("</ul>")
        for name, svg in each.svg.items():
            # As an image, so that names inside of one figure can't meet those of another.
            data = base64.b64encode(svg).decode()
            parts.append(
                f'<figure><img alt="{escape(_called(section))}: {escape(name)}" '
                f'src="data:image/svg+xml;base64,{data}"></figure>'
            )
        parts += [table.html() for table in section.tables]
        parts.append("</section>")
    if failures is not None:
        parts.append(f"<section><h2>Failures</h2>{failures.html()}</section>")
    return "\n".join([*parts, "</body>\n</html>"]) + "\n"
