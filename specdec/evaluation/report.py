"""`report.html`: one file that can be sent around, table and plots inside."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from specdec.evaluation.folder import CONFIG, write_text
from specdec.evaluation.metrics import Metrics
from specdec.evaluation.plots import SPEEDUP, SURVIVAL
from specdec.evaluation.table import TextTable, study_table

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.2rem; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto; font-size: 13px; }}
</style>
</head>
<body>
<h1>{title}</h1>
{table}
{plots}
<details><summary>configuration</summary><pre>{config}</pre></details>
<details><summary>provenance</summary><pre>{provenance}</pre></details>
</body>
</html>
"""


def write_report(folder: Path, metrics: Metrics) -> None:
    """Writes the report of a run folder that has its plots, configuration and provenance."""
    table = study_table(metrics)
    plots = [folder / name for name in (SPEEDUP, SURVIVAL) if (folder / name).is_file()]
    page = _PAGE.format(
        title=escape(table.title),
        table=_html_table(table),
        plots="\n".join(_image(path) for path in plots),
        config=escape((folder / CONFIG).read_text(encoding="utf-8")),
        provenance=escape((folder / "provenance.json").read_text(encoding="utf-8")),
    )
    write_text(folder / "report.html", page)


def _html_table(table: TextTable) -> str:
    def row(tag: str, cells: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row("th", list(table.columns)), *(row("td", list(cells)) for cells in table.rows)]
    notes = "".join(f"<p>{escape(note)}</p>" for note in table.notes)
    return "<table>\n" + "\n".join(lines) + "\n</table>\n" + notes


def _image(path: Path) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{encoded}">'
