"""Serve plans over HTTP: a profile and a budget in, a policy out. Imports no torch.

The public names stand in `__init__.pyi`. Each is imported when it is first used (PEP 562): the child process
that solves a request lives in this package too, and needs no web server.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
