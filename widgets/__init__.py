"""Live views of a workbench, for notebooks: installed as `workbench_widgets`. They draw from telemetry on disk."""

from workbench_widgets.timeline_view import TimelineView

__all__ = ["TimelineView"]
