"""Which role runs on which devices: layouts, pools and placements. Plain values: no process is started here."""

from workbench.placement.placement import Placement, Pool, host_name
from workbench.settings.layout import Layout
from workbench.settings.roles import ENVIRONMENT, ROLES, ROLLOUT, TRAINED_ROLES, check_role

__all__ = ["ENVIRONMENT", "ROLES", "ROLLOUT", "TRAINED_ROLES", "Layout", "Placement", "Pool", "check_role", "host_name"]
