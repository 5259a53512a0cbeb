"""Makes `http_parts` importable: test modules are imported on their own, not as a package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
