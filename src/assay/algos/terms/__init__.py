"""Built-in loss terms, one per module. Importing this package imports, and thereby registers, all of them."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
