"""Pictures of static trees."""

from __future__ import annotations

from io import BytesIO
from itertools import count

from drafttree.bench.tree_fit import Shares
from drafttree.tree import RankPath, StaticTree

_SMALLEST, _LARGEST = 30.0, 500.0
"""Areas of the markers, in square points."""


def drawn(tree: StaticTree, shares: Shares | None, form: str) -> bytes:
    """A picture of a tree with the rank of each node.

    Args:
        tree: The tree.
        shares: Share of steps in which each node is accepted; larger shares get larger and brighter
            markers. If None, all nodes look alike.
        form: The picture's format, such as `png`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not support the format.
    """
    from matplotlib.figure import Figure

    across = _columns(tree)
    leaves = 1 + max(across.values())
    figure = Figure(figsize=(min(max(6.0, 0.28 * leaves), 60.0), 1.5 + 0.9 * tree.depth))
    axes = figure.add_subplot()
    for path in tree.paths:
        ends = path[:-1], path
        axes.plot(
            [across[end] for end in ends],
            [-len(end) for end in ends],
            color="lightgrey",
            linewidth=0.8,
            zorder=1,
        )
    values = [1.0 if shares is None else shares[path] for path in tree.paths]
    most = max(values) or 1.0
    points = axes.scatter(
        [across[path] for path in tree.paths],
        [-len(path) for path in tree.paths],
        s=[_SMALLEST + (_LARGEST - _SMALLEST) * value / most for value in values]
        if shares is not None
        else 4 * _SMALLEST,
        c="tab:blue" if shares is None else values,
        zorder=2,
    )
    axes.scatter([across[()]], [0], s=_LARGEST / 2, facecolors="white", edgecolors="black")
    for path in tree.paths:
        axes.annotate(
            str(path[-1]),
            (across[path], -len(path)),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=6,
        )
    if shares is not None:
        figure.colorbar(points, label="share of decode steps in which the node is accepted")
    axes.set_axis_off()
    figure.tight_layout()
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format=form)
    return picture.getvalue()


def _columns(tree: StaticTree) -> dict[RankPath, float]:
    """Horizontal positions: leaves side by side, other nodes centred above their children."""
    children: dict[RankPath, list[RankPath]] = {(): []} | {path: [] for path in tree.paths}
    for path in tree.paths:
        children[path[:-1]].append(path)
    place = count()
    across: dict[RankPath, float] = {
        path: float(next(place)) for path in sorted(tree.paths) if not children[path]
    }
    for path in (*reversed(tree.paths), ()):
        if children[path]:
            across[path] = (across[children[path][0]] + across[children[path][-1]]) / 2
    return across
