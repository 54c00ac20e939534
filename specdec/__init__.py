"""specdec: a research framework for speculative decoding."""
