"""Static views: html and svg that need no widget and no script, and draw the same from a saved notebook.

Everything here takes plain records, does no I/O, and reads in light and dark themes and without colour.
"""

from workbench.display.html import bytes_text, kv, seconds_text, table
from workbench.display.palette import role_styles
from workbench.display.progress import Progress
from workbench.display.timeline import Timeline, timeline

__all__ = ["Progress", "Timeline", "bytes_text", "kv", "role_styles", "seconds_text", "table", "timeline"]
