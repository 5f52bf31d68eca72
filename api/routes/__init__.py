"""The routes, one file for each kind of thing."""

from autoac.api.routes import aliases, health, jobs, policies, profiles, solves, web

ROUTERS = (
    health.router,
    profiles.router,
    policies.router,
    aliases.router,
    solves.router,
    jobs.router,
    web.router,
)
