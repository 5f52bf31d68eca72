"""The routes, one file for each kind of resource."""

from autoac.api.routes import health, jobs, policies, profiles, solves, web

ROUTERS = (
    policies.router,  # first: routes are tried in order, and these serve most requests
    policies.comparing,
    health.router,
    profiles.router,
    solves.router,
    jobs.router,
    web.router,
)
