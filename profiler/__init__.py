"""Turn one training step of a model into a Profile.

The public names are in `__init__.pyi`. Each is imported when it is first used (PEP 562).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
