"""The routes, one file for each kind of thing."""

from autoac.api.routes import aliases, health, jobs, models, policies, profiles, solves, web

ROUTERS = (
    policies.router,  # first, since routes are tried in order, and these are asked for most
    health.router,
    profiles.router,
    models.router,
    aliases.router,
    solves.router,
    jobs.router,
    web.router,
)
