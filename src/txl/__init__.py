"""Transformer-XL: language models that read past a fixed-length context.

`__init__.pyi` lists the public names. Each is imported on first use, so that `import txl` does not import PyTorch.
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.2.0.dev0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# Not lazy: the function `presets` and the package `txl.presets` share a name, and importing the package would hide it.
from txl.presets import preset as preset  # noqa: E402
from txl.presets import presets as presets  # noqa: E402
