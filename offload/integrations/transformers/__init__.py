"""Sessions for transformers: a `past_key_values` that lives in pages and moves to the host when idle.

Start at `offload.integrations.transformers.session`.
"""

from offload.integrations.transformers.cache import PagedCache
from offload.integrations.transformers.model import pool_spec
from offload.integrations.transformers.session import Session, Sessions

__all__ = ["PagedCache", "Session", "Sessions", "pool_spec"]
