"""Apply a memory budget to a model, and carry out its plan with the same gradients.

The public names stand in `__init__.pyi`. Each is imported when it is first used (PEP 562).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
