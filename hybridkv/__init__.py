"""KV caches for models that mix attention with recurrent state, and for looped models."""
