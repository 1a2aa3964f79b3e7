"""`wb.adapters`: environments and tools of other libraries, one file each. Libraries are imported only on use."""

from __future__ import annotations

from workbench.data.adapters.gymnasium_environment import Gymnasium as Gymnasium
from workbench.data.adapters.mcp_tools import mcp_tools as mcp_tools
from workbench.data.adapters.openenv_environment import OpenEnv as OpenEnv
