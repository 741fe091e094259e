"""Figures of panels, and image files of figures, drawn by matplotlib, which is loaded only for drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdgemm.errors import ArgumentError
from pdgemm.support.files import MARK
from pdgemm.tools.studies.panels import WIDTH, FigurePanel

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure


def form_of(out: Path, forms: Sequence[str]) -> str:
    """Return the extension of a file in lower case.  Raises ArgumentError where `forms` does not list it."""
    form = out.suffix.lower()
    if form not in forms:
        some = " or ".join(filter(None, (", ".join(forms[:-1]), forms[-1])))
        raise ArgumentError(f"{out}: a report is a file with the ending {some}")
    return form


@contextmanager
def drawing() -> Iterator[None]:
    """Provide the style of all figures in the block.  Raises ArgumentError where packages of a report are missing."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise ArgumentError(f"a report needs {' and '.join(missing)}: pip install matplotlib jinja2")
    import matplotlib as mpl

    with as_file(files("pdgemm.tools.studies") / "report.mplstyle") as style, mpl.rc_context(fname=style):
        yield


# ------------------------------------------------------------------ whole figures
def figure_of_panel(panel: FigurePanel, shared: Collection[str] = ()) -> Figure:
    """Return a figure of one panel, with its legend below.   shared : labels that another legend shows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * WIDTH if panel.wide else WIDTH, panel.height), layout="constrained")
    _fill(figure, panel, shared)
    return figure


def shared_entries(panels: Sequence[FigurePanel]) -> dict[str, Any]:
    """Return the legend entries, by label, that several panels have and that one common legend shows."""
    from matplotlib.figure import Figure

    handles, often = dict[str, Any](), Counter[str]()
    for panel in panels:
        axes = Figure().subplots()
        panel.draw(axes)
        entries = dict(zip(*axes.get_legend_handles_labels()[::-1]))
        often.update(entries.keys())
        handles |= {label: handle for label, handle in entries.items() if label not in handles}
    return {label: handle for label, handle in handles.items() if often[label] > 1}


def legend(entries: dict[str, Any]) -> Figure:
    """Return a figure that holds only a legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, _legend_height(entries, False)), layout="constrained")
    _add_legend(figure, entries, False, "center")
    return figure


def figure_of_sections(sections: Sequence[tuple[str, Sequence[FigurePanel]]]) -> Figure:
    """Return a figure of all panels of all sections, two in a row, wide panels below them."""
    from matplotlib.figure import Figure

    rows = list[tuple[str, list[FigurePanel]]]()
    shared: dict[int, dict[str, Any]] = {}  # by row number; such a row has a legend and no panel
    of_row = list[dict[str, Any]]()
    for title, panels in sections:
        entries = shared_entries(panels)
        narrow = [x for x in panels if not x.wide]
        pairs = [narrow[at : at + 2] for at in range(0, len(narrow), 2)] + [[x] for x in panels if x.wide]
        if entries:
            shared[len(rows)], pairs = entries, [[], *pairs]
        rows += zip([title] + [""] * len(pairs), pairs)
        of_row += [entries] * len(pairs)
    heights = [
        (max(x.height for x in row) if row else _legend_height(shared[at], True)) + 0.45 * bool(title)
        for at, (title, row) in enumerate(rows)
    ]
    figure = Figure(figsize=(2 * WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for at, (part, (title, row)) in enumerate(zip(parts, rows)):
        if title:
            part.suptitle(title, fontsize=11, fontweight="bold")
        if not row:
            _add_legend(part, shared[at], True, "lower center")
            continue
        places = part.subfigures(1, 1 if row[0].wide else 2, squeeze=False)[0]
        for place, panel in zip(places, row):
            _fill(place, panel, of_row[at])
    return figure


def saved(figure: Figure, form: str) -> bytes:
    """Return the image file of a figure, "png" or "svg"; the same figure gives the same bytes."""
    buffer = BytesIO()
    by = MARK.decode()
    metadata = {"Date": None, "Creator": by} if form == "svg" else {"Software": by}
    figure.savefig(buffer, format=form, dpi=200, metadata=metadata)
    return buffer.getvalue()


def _fill(place: Figure | SubFigure, panel: FigurePanel, shared: Collection[str] = ()) -> None:
    """Draw a panel, and below it its legend, which never covers data and has each label once, except shared labels."""
    axes = place.subplots()
    panel.draw(axes)
    axes.set_title(panel.title)
    handles, labels = axes.get_legend_handles_labels()
    entries = {label: handle for label, handle in zip(labels, handles) if label not in shared}
    if entries:
        _add_legend(place, entries, panel.wide, "outside lower center")


def _add_legend(place: Figure | SubFigure, entries: dict[str, Any], wide: bool, where: Any) -> None:
    place.legend(entries.values(), entries.keys(), loc=where, ncols=_columns(entries, wide))


def _columns(entries: Collection[str], wide: bool) -> int:
    longest = max(map(len, entries), default=0)
    return (5 if longest < 26 else 3) if wide else 3 if longest < 26 else 2 if longest < 48 else 1


def _legend_height(entries: Collection[str], wide: bool) -> float:
    return 0.15 + 0.2 * -(-len(entries) // _columns(entries, wide))
