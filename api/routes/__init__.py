"""The routes, one file for each kind of resource."""

from autoac.api.routes import aliases, health, jobs, models, policies, profiles, solves, web

ROUTERS = (
    policies.router,  # first: routes are tried in order, and these serve most requests
    health.router,
    profiles.router,
    models.router,
    aliases.router,
    solves.router,
    jobs.router,
    web.router,
)
