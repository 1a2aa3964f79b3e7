"""Where it runs: layouts, pools and placements. Pure values: no process is started here."""

from workbench.placement.layout import Layout
from workbench.placement.placement import ROLES, ROLLOUT, TRAINED_ROLES, Placement, Pool, check_role, host_name

__all__ = ["ROLES", "ROLLOUT", "TRAINED_ROLES", "Layout", "Placement", "Pool", "check_role", "host_name"]
