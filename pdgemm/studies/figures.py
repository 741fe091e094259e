"""Panels become figures, and figures files, by matplotlib, which is loaded when something is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

from pdgemm.errors import ArgumentError
from pdgemm.studies.panels import WIDTH, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure


@contextmanager
def drawing() -> Iterator[None]:
    """All figures have this style.  Raises ArgumentError where the packages of a report are missing."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise ArgumentError(f"a report needs {' and '.join(missing)}: pip install matplotlib jinja2")
    import matplotlib as mpl

    with as_file(files("pdgemm.studies") / "report.mplstyle") as style, mpl.rc_context(fname=style):
        yield


# ------------------------------------------------------------------ whole figures
def alone(panel: Panel) -> Figure:
    """Return a figure of one panel, with its legend below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * WIDTH if panel.wide else WIDTH, panel.height), layout="constrained")
    _fill(figure, panel)
    return figure


def together(sections: Sequence[tuple[str, Sequence[Panel]]]) -> Figure:
    """Return a figure of all panels of all sections, two in a row, a wide one below them."""
    from matplotlib.figure import Figure

    rows = list[tuple[str, list[Panel]]]()
    for title, panels in sections:
        narrow = [x for x in panels if not x.wide]
        pairs = [narrow[at : at + 2] for at in range(0, len(narrow), 2)] + [[x] for x in panels if x.wide]
        rows += zip([title] + [""] * len(pairs), pairs)
    heights = [max(x.height for x in row) + 0.45 * bool(title) for title, row in rows]
    figure = Figure(figsize=(2 * WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, row) in zip(parts, rows):
        if title:
            part.suptitle(title, fontsize=11, fontweight="bold")
        places = part.subfigures(1, 1 if row[0].wide else 2, squeeze=False)[0]
        for place, panel in zip(places, row):
            _fill(place, panel)
    return figure


def saved(figure: Figure, form: str) -> bytes:
    """Return the file of a figure, "png" or "svg"; the same figure becomes the same bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format=form, dpi=200, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def _fill(place: Figure | SubFigure, panel: Panel) -> None:
    """Draw a panel, and below it its legend, which is never on data and names each label once."""
    axes = place.subplots()
    panel.draw(axes)
    axes.set_title(panel.title)
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles))
    longest = max(map(len, labels), default=0)
    columns = (5 if longest < 26 else 3) if panel.wide else 3 if longest < 26 else 2 if longest < 48 else 1
    place.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)
