"""Is a combination of target, drafter, tree, verifier and sampling exact? Statistics, with their own controls."""
