"""All dashboards, in the order of the documentation."""

from common.observability.dashboards import actors, learner, overview, transport

DASHBOARDS = (overview.DASHBOARD, learner.DASHBOARD, actors.DASHBOARD, transport.DASHBOARD)
