"""Adapters to other libraries: transformers generate, vLLM, Ray."""
