"""Live views of a workbench: anywidget and plotly on top of the static views of `workbench.display`."""
