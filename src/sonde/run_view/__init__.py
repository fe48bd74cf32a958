"""RunView: the facts of one attempt of one rank as columns, for rules, reports and comparisons."""

from sonde.run_view.layer_statistics_in_blocks import Block, LayerTable, Reduction
from sonde.run_view.run_view import RunView, newest_views, trained_view

__all__ = ["Block", "LayerTable", "Reduction", "RunView", "newest_views", "trained_view"]
