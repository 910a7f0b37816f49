"""Sessions for transformers: a `past_key_values` that lives in pages and moves to the host when idle.

Start at `offload.integrations.transformers.session`.
"""

from offload.integrations.transformers.versions import check, needed

with needed():
    from transformers import PreTrainedConfig as _Config
    from transformers.cache_utils import LinearAttentionLayer as _Layer

    from offload.integrations.transformers.cache import PagedCache
    from offload.integrations.transformers.kept import Kept, kept_by
    from offload.integrations.transformers.layers import StateLayer as _StateLayer
    from offload.integrations.transformers.pools import SessionPools, session_pools
    from offload.integrations.transformers.session import Session, Sessions

check(_Config, _Layer, _StateLayer)

__all__ = ["Kept", "PagedCache", "Session", "SessionPools", "Sessions", "kept_by", "session_pools"]
