"""The serving core: paged K/V, continuous batching, and the speculative step."""
